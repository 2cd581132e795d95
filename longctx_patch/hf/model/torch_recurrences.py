"""A model whose recurrent layers run without the kernels that are installed.

These know neither the CPU nor float64. transformers decides between a package's kernel and its own
torch function when it is imported, and hands the kernel whatever comes.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import torch_function
from longctx_patch.hf.model.with_names import with_names

Function = Callable[..., Any]


def run_torch_recurrences(model: nn.Module) -> None:
    """Let a model's recurrent layers run transformers' torch functions from now on, patched later
    or not. Other models of the process keep their kernels."""
    made = dict[type[nn.Module], type[nn.Module]]()
    for mixer in transformers_api.recurrent_modules(model):
        cls = type(mixer)
        if cls not in made:
            made[cls] = _with_torch_functions(cls)
        mixer.__class__ = made[cls]


def _with_torch_functions(cls: type[nn.Module]) -> type[nn.Module]:
    """The class, with another forward."""
    forward = transformers_api.code_of(cls)
    names = transformers_api.SEQUENCE_FUNCTIONS & forward.__globals__.keys()
    functions = {name: torch_function(forward.__globals__[name]) for name in names}
    known = {name: _with_known_options(function) for name, function in functions.items()}
    members = {
        "forward": with_names(forward, known),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (cls,), members)


def _with_known_options(function: Function) -> Function:
    """Options that it doesn't know are left out, as transformers does."""
    known = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
        return function

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        return function(*args, **{name: value for name, value in options.items() if name in known})

    return run
