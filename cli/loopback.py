"""The store through which processes of one machine find each other, on its loopback alone.

torch's own listens on every interface of the machine, so that whoever reaches it can write there.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "longctx_loopback"
ADDRESS = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)
"""How long a process waits for what another one writes."""


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one launcher, which keeps the store for its processes."""

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        self._run_id, self._place = run_id, RendezvousStoreInfo(ADDRESS, port)
        self._store = TCPStore(
            ADDRESS,
            port,
            is_master=True,
            timeout=TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, self._place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is nothing that others could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def register_loopback() -> str:
    """Make the rendezvous known to torch's launcher. Returns its name there."""
    rendezvous_handler_registry.register(BACKEND, _make)
    return BACKEND
