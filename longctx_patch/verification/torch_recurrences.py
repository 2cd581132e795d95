"""Recurrent layers without the kernels that are installed, which know neither the CPU nor float64.

transformers decides between a package's kernel and its own torch function when it is imported, and
hands the kernel whatever comes, tensors of the CPU too.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import torch_function

Function = Callable[..., Any]


@contextmanager
def torch_recurrences(model: nn.Module) -> Iterator[None]:
    """The recurrent layers of a model's classes run transformers' torch functions in the block.

    A patch of the model has to be made in it, since layers look functions up then.
    """
    with_mixers = transformers_api.recurrent_modules(model)
    homes = [transformers_api.code_of(cls).__globals__ for cls in {type(m) for m in with_mixers}]
    taken = [
        (home, name, home[name])
        for home in homes
        for name in transformers_api.SEQUENCE_FUNCTIONS & home.keys()
    ]
    try:
        for home, name, function in taken:
            home[name] = _as_without_kernel(torch_function(function))
        yield
    finally:
        for home, name, function in taken:
            home[name] = function


def _as_without_kernel(function: Function) -> Function:
    """With the options that it doesn't know left out, as transformers calls it."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        return function(*args, **{name: value for name, value in options.items() if name in known})

    return run
