"""Where launched processes find each other."""

import random
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from torch.distributed import TCPStore

ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
"""For processes that meet at a port of `held_ports`, beside MASTER_PORT."""


@contextmanager
def held_ports(number: int) -> Iterator[list[int]]:
    """Ports at which processes can meet, each once.

    This process listens there, as the agent of torchrun does, so that nobody else can take a port
    between its choice and the first use, which is seconds later.
    """
    stores = [
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(number)
    ]
    yield [store.port for store in stores]


def unused_port() -> int:
    """A port where nobody listens, and that the system gives to no connection by itself."""
    for port in random.sample(range(20_000, 32_000), 100):
        with closing(socket.socket()) as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("100 ports of this machine between 20000 and 32000 are in use")
