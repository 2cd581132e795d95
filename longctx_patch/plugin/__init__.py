"""Sequence parallelism inside Accelerate: device mesh, checks of the world, launch YAML."""

from longctx_patch.families.stored_tensors import NeedsWholeReading
from longctx_patch.plugin.accelerator import (
    close_accelerator,
    make_accelerator,
    states_on_host,
)
from longctx_patch.plugin.launch_yaml import accelerate_yaml
from longctx_patch.plugin.parallelism import SequenceParallelismConfig
from longctx_patch.plugin.text_only import text_model
from longctx_patch.plugin.unread import load_sharded, unread_model

__all__ = [
    "NeedsWholeReading",
    "SequenceParallelismConfig",
    "accelerate_yaml",
    "close_accelerator",
    "load_sharded",
    "make_accelerator",
    "states_on_host",
    "text_model",
    "unread_model",
]
