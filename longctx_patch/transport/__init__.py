"""Moving blocks between ranks: torch.distributed, or virtual ranks inside one process."""

from longctx_patch.transport.packets import Packet, TensorSpec
from longctx_patch.transport.process_group import ProcessGroupTransport
from longctx_patch.transport.protocol import Counters, Message, Pending, SoloTransport, Transport
from longctx_patch.transport.virtual import VirtualTransport, run_virtual_ranks

__all__ = [
    "Counters",
    "Message",
    "Packet",
    "Pending",
    "ProcessGroupTransport",
    "SoloTransport",
    "TensorSpec",
    "Transport",
    "VirtualTransport",
    "run_virtual_ranks",
]
