"""The store through which processes of one machine find each other, on its loopback alone.

torch's own listens on every interface of the machine, so that whoever reaches it can write there.
"""

import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

BACKEND = "longctx_loopback"
ADDRESS = "127.0.0.1"
TIMEOUT_S = 600
"""How long a process waits for what another one writes."""


class LoopbackRendezvous(StaticTCPRendezvous):
    """A rendezvous of one launcher, which keeps the store for its processes."""

    def __init__(self, given: RendezvousParameters) -> None:
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        super().__init__(
            ADDRESS, port, rank=0, world_size=1, run_id=given.run_id, timeout=TIMEOUT_S
        )
        self._store = TCPStore(
            ADDRESS,
            port,
            is_master=True,
            timeout=self.timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return BACKEND


def register_loopback() -> str:
    """Make the rendezvous known to torch's launcher. Returns its name there."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    return BACKEND
