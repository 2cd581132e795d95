"""Starts the processes of a job: those of a machine wait for each other, and gloo is given the
interface that leads to other machines.

A fork takes along the locks that other threads of the launcher hold at that moment. The thread of
torch's store looks up the name of whoever connects to it, under a lock of the C library: a process
that is forked meanwhile has this lock taken for ever, and hangs as it connects itself. So nobody
connects while others are still to be forked.

gloo binds to the address of the machine's own name. On many systems that is the loopback (Debian's
/etc/hosts says 127.0.1.1), over which no other machine can be reached.
"""

import os
import socket
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil

BORN = "longctx_born"
"""A file in the folder that torch's launcher makes for each process, once the process is there."""
PATIENCE_S = 60.0
"""The time after which a process goes on without the others, whose files a full disk may lack."""
LOOK_S = 0.01


def wait_for_siblings() -> None:
    """Wait until all processes of this machine are there; at once without torch's launcher."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return
    folder = Path(error_file).parent
    with suppress(OSError):
        (folder / BORN).touch()
    deadline = time.monotonic() + PATIENCE_S
    for rank in range(int(os.environ["LOCAL_WORLD_SIZE"])):
        file = folder.parent / str(rank) / BORN
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(LOOK_S)


ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737): the default route leads there."""


def choose_gloo_interface() -> None:
    """Set GLOO_SOCKET_IFNAME where a world spans machines and gloo would take the loopback.

    It becomes the interface that leads to the first machine (MASTER_ADDR), and on the first machine
    itself that of the default route. A value that is set already is kept.

    Raises:
        ValueError: no other interface leads anywhere.
    """
    if not _spans_machines() or "GLOO_SOCKET_IFNAME" in os.environ or not _takes_loopback():
        return
    first = os.environ["MASTER_ADDR"]
    name = _interface_towards(first) or _interface_towards(ELSEWHERE)
    if name is None:
        raise ValueError(
            f"the name of this machine, {socket.gethostname()}, and MASTER_ADDR={first} lead to "
            "the loopback here, over which gloo reaches no other machine. Set GLOO_SOCKET_IFNAME "
            "to the interface between the machines (`ip -brief address` lists them), or give the "
            "first machine's address in place of its name."
        )
    os.environ["GLOO_SOCKET_IFNAME"] = name


def _spans_machines() -> bool:
    local, first = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("MASTER_ADDR", "localhost")
    if local is None or local == os.environ.get("WORLD_SIZE") or first == "localhost":
        return False
    with suppress(ValueError):  # a name
        return not ip_address(first).is_loopback
    return True


def _takes_loopback() -> bool:
    """Says whether the first own address of this machine's name is a loopback address."""
    with suppress(OSError):
        name = socket.gethostname()
        for family, kind, *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return ip_address(address[0]).is_loopback
    return True  # gloo's fallback


def _interface_towards(machine: str) -> str | None:
    """The interface that leads to another machine, if there is one."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((machine, 9))  # sends nothing
        mine = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if not ip_address(mine).is_loopback and mine in {a.address for a in addresses}:
                return name
    return None
