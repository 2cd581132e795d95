"""What is kept and what is recomputed."""

from longctx_patch.memory.auto import LADDER, MARGIN, AutoPolicy, Extra, MemoryUse, Pass
from longctx_patch.memory.meter import Meter, meter_of
from longctx_patch.memory.offload import HostCopies, HostMemoryFull
from longctx_patch.memory.policies import LayerPolicy, run_layer

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
    "meter_of",
    "run_layer",
]
