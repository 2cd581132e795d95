"""Names the kernels that transformers runs in place of its own functions along the sequence, and
makes models whose recurrent layers run without them: kernels know neither the CPU nor float64.

`use_kernel_func_from_hub_with_fallback` decides when a module is imported: a kernel of the package
where that can be imported, and its torch function after any error. Checked with 5.17 to 5.24.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from longctx_patch.hf.model import transformers_api

Function = Callable[..., Any]
_FUSED = "mamba2_split_conv1d_scan_combined"
_CONVOLUTIONS = ("causal_conv1d_fwd_function", "causal_conv1d_cuda")
"""What mamba-ssm's fused kernel calls of causal-conv1d, by its versions."""


class Kernel(NamedTuple):
    """A function of a package."""

    distribution: str
    """What pip calls the package."""
    module: str
    name: str

    @property
    def is_installed(self) -> bool:
        """Says whether the package is there, working or not."""
        return find_spec(self.module.partition(".")[0]) is not None

    def import_error(self) -> Exception | None:
        try:
            getattr(import_module(self.module), self.name)
        except Exception as error:  # packages of compiled code raise any
            return error
        return None


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "causal_conv1d_fn": Kernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn"),
        "torch_chunk_gated_delta_rule": Kernel(
            "flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"
        ),
        "chunk_kimi_delta_attention": Kernel("flash-linear-attention", "fla.ops.kda", "chunk_kda"),
        "mamba2_chunk_scan": Kernel(
            "mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"
        ),
    }
)
"""The kernel for each of transformers' functions that a chain runs."""


def functions_of(mixer: nn.Module) -> dict[str, Function]:
    """Returns the functions that a recurrent layer's forward calls and that have a kernel."""
    forward = transformers_api.code_of(type(mixer))
    names = [name for name in KERNELS if name in forward.__code__.co_names]
    return {name: forward.__globals__[name] for name in names}


def torch_function(function: Function) -> Function:
    """transformers' own code of one of these functions."""
    return inspect.unwrap(_given(function) if isinstance(function, nn.Module) else function)


def chosen(function: Function) -> Function:
    """Returns what one of these functions runs: a kernel, or `torch_function`; that too where
    transformers' code doesn't say, as another version of it might."""
    own = plain(function)
    if not hasattr(own, "__wrapped__"):  # a kernel of the hub has taken its place
        return own
    implementation: Function = inspect.getclosurevars(own).nonlocals.get(
        "implementation", torch_function(own)
    )
    return implementation


def runs_kernel(function: Function) -> bool:
    return chosen(function) is not torch_function(function)


def lacks_convolution(mixer: nn.Module) -> bool:
    """Says whether transformers' own forward of a layer ends with an error in training, without a
    cache: mamba-ssm's kernel for the convolution and the scan at once needs causal-conv1d. Where it
    can't import that, it has None for its functions."""
    forward = transformers_api.code_of(type(mixer))
    if _FUSED not in forward.__code__.co_names:
        return False
    fused = forward.__globals__[_FUSED]
    if not runs_kernel(fused):
        return False
    taken = getattr(chosen(fused), "__globals__", {})
    has_none = any(taken.get(name, fused) is None for name in _CONVOLUTIONS)
    return has_none or not runs_kernel(functions_of(mixer)["causal_conv1d_fn"])


def kernel_takes(function: Function, option: str) -> bool:
    """Says whether what one of these functions runs is a kernel that names an option: transformers
    drops what a kernel doesn't name."""
    return runs_kernel(function) and option in inspect.signature(chosen(function)).parameters


def plain(function: Function) -> Function:
    """With the package `kernels`, each function is the forward of a module."""
    if not isinstance(function, nn.Module):
        return function
    return function.forward if "forward" in vars(function) else _given(function)


def _given(function: nn.Module) -> Function:
    """Returns what such a module was made of, whatever has replaced its forward."""
    inner: Function = inspect.getclosurevars(type(function).forward).nonlocals["func"]
    return inner


def with_names(function: FunctionType, meanings: Mapping[str, Any]) -> FunctionType:
    """A copy of a function, for which names of its module mean something else."""
    made = FunctionType(
        function.__code__,
        function.__globals__ | dict(meanings),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


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
