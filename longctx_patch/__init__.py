"""Train Hugging Face models on very long sequences, with the numbers one GPU would give.

Names load at first use, so importing the package costs nothing; `attention` and what it needs want
torch alone, `patch` also transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longctx_patch.choose.chooser import compare, explain
    from longctx_patch.config import LongContextConfig
    from longctx_patch.data import SequenceShardCollator, pack_rows
    from longctx_patch.engine.groups import make_sequence_group, virtual_group, world_place
    from longctx_patch.engine.operator import attention
    from longctx_patch.hf import (
        PatchHandle,
        SequenceParallelismError,
        UnsupportedModelError,
        patch,
    )
    from longctx_patch.loss.law import count_valid_tokens
    from longctx_patch.predict.attention.costs import Workload
    from longctx_patch.sequence.documents import Documents
    from longctx_patch.sequence.masks import Mask
    from longctx_patch.transport import run_virtual_ranks

_HOME = {
    "Documents": "sequence.documents",
    "LongContextConfig": "config",
    "Mask": "sequence.masks",
    "PatchHandle": "hf",
    "SequenceParallelismError": "hf",
    "SequenceShardCollator": "data",
    "UnsupportedModelError": "hf",
    "Workload": "predict.attention.costs",
    "attention": "engine.operator",
    "compare": "choose.chooser",
    "count_valid_tokens": "loss.law",
    "explain": "choose.chooser",
    "make_sequence_group": "engine.groups",
    "pack_rows": "data",
    "patch": "hf",
    "run_virtual_ranks": "transport",
    "virtual_group": "engine.groups",
    "world_place": "engine.groups",
}

__all__ = [
    "Documents",
    "LongContextConfig",
    "Mask",
    "PatchHandle",
    "SequenceParallelismError",
    "SequenceShardCollator",
    "UnsupportedModelError",
    "Workload",
    "attention",
    "compare",
    "count_valid_tokens",
    "explain",
    "make_sequence_group",
    "pack_rows",
    "patch",
    "run_virtual_ranks",
    "virtual_group",
    "world_place",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
