"""What is kept, what is recomputed, and how much at once."""

from longctx_patch.memory.allocator import let_segments_grow
from longctx_patch.memory.auto import LADDER, MARGIN, AutoPolicy, Extra, MemoryUse, Pass, Rehearsed
from longctx_patch.memory.last_product import is_plain
from longctx_patch.memory.meter import Meter, meter_of, total_bytes
from longctx_patch.memory.offload import HostCopies, HostMemoryFull
from longctx_patch.memory.policies import LayerPolicy, run_layer
from longctx_patch.memory.tiled_mlp import run_tiled, tiles_that_fit

__all__ = [
    "LADDER",
    "MARGIN",
    "AutoPolicy",
    "Extra",
    "HostCopies",
    "HostMemoryFull",
    "LayerPolicy",
    "MemoryUse",
    "Meter",
    "Pass",
    "Rehearsed",
    "is_plain",
    "let_segments_grow",
    "meter_of",
    "run_layer",
    "run_tiled",
    "tiles_that_fit",
    "total_bytes",
]
