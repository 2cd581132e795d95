"""Hugging Face models. Names load at first use: the table of support needs no transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longctx_patch.hf.call.meeting import SequenceParallelismError
    from longctx_patch.hf.model.checks import FAMILIES, UnsupportedModelError, check_model_config
    from longctx_patch.hf.patching import PatchHandle, patch

_HOME = {
    "FAMILIES": "model.checks",
    "PatchHandle": "patching",
    "SequenceParallelismError": "call.meeting",
    "UnsupportedModelError": "model.checks",
    "check_model_config": "model.checks",
    "patch": "patching",
}

__all__ = [
    "FAMILIES",
    "PatchHandle",
    "SequenceParallelismError",
    "UnsupportedModelError",
    "check_model_config",
    "patch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
