"""Network interfaces, this machine's name, and the place where processes meet."""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import psutil

from longctx_patch.diagnosis.check import Check

USUAL_PORT = 29500
"""What `accelerate launch` and the files of `longctx patch` use."""
CHOSEN_BY = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_CONNECT_S = 5.0


@dataclass(frozen=True)
class Network:
    """What this machine is called and where it can be reached."""

    name: str
    addresses: Mapping[str, tuple[str, ...]]
    """IP addresses of each interface that is up."""
    name_is: str | None
    """The address that the machine's own name resolves to; None: it does not."""
    chosen: Mapping[str, str]
    """The variables that choose an interface, as far as they are set."""

    @property
    def outward(self) -> dict[str, tuple[str, ...]]:
        """The interfaces that other machines may reach."""
        return {
            interface: theirs
            for interface, theirs in self.addresses.items()
            if not all(map(_is_loopback, theirs))
        }


def read_network() -> Network:
    """The network as it is now."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: tuple(each.address.partition("%")[0] for each in found if each.family in families)
        for name, found in psutil.net_if_addrs().items()
        if name in up
    }
    name = socket.gethostname()
    chosen = {variable: os.environ[variable] for variable in CHOSEN_BY if os.environ.get(variable)}
    return Network(name, {k: v for k, v in addresses.items() if v}, resolved(name), chosen)


def resolved(host: str) -> str | None:
    """The first address that a name or address stands for, or None."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (socket.gaierror, UnicodeError):
        return None


def check_network(network: Network, *, several_nodes: bool) -> Check:
    """Whether the interfaces that were chosen exist and, for several nodes, who can be reached."""
    shown = ", ".join(f"{name} {theirs[0]}" for name, theirs in network.outward.items())
    text = shown or "no interface but loopback"
    for variable, value in network.chosen.items():
        names = [name for part in value.split(",") if (name := part.lstrip("^=").split(":")[0])]
        if not value.startswith("^") and not any(
            there.startswith(name) for name in names for there in network.addresses
        ):
            there = ", ".join(network.addresses)
            fix = f"unset {variable}, or export {variable}=NAME with one of: {there}"
            return Check("network", "failed", f"{variable}={value}: no such interface", fix)
    if not several_nodes or "GLOO_SOCKET_IFNAME" in network.chosen:
        return Check("network", "ok", text)
    first = next(iter(network.outward), None)
    if first is None:
        return Check("network", "failed", text, "connect this machine to the others' network")
    if network.name_is is None or _is_loopback(network.name_is):
        where = "does not resolve" if network.name_is is None else f"is {network.name_is}"
        text += f"; the name {network.name} {where}, so gloo would listen on loopback alone"
        return Check("network", "warning", text, f"export GLOO_SOCKET_IFNAME={first}")
    return Check("network", "ok", text)


def parse_place(text: str) -> tuple[str, int]:
    """(host, port) of `host:port`, `host` or `[address]:port`. Raises ValueError otherwise."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+)(?::(\d{1,5}))?", text.strip())
    port = int(match[2] or USUAL_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise ValueError(f"--rendezvous {text!r}: write a host and a port, as node1:{USUAL_PORT}.")
    return match[1].strip("[]"), port


def check_port(port: int = USUAL_PORT) -> Check:
    """Whether a launcher on this machine could listen on its usual port."""
    if (problem := _listen("", port)) is None:
        return Check("rendezvous", "ok", f"port {port} is free")
    return Check("rendezvous", "warning", f"port {port}: {problem}", _other_port())


def check_meeting(host: str, network: Network) -> Check:
    """Whether the name of the machine where a launcher's processes meet resolves here."""
    if (address := resolved(host)) is None:
        return _unresolved(host, network)
    return Check("rendezvous", "ok", f"{host} ({address}), as the launcher says")


def check_rendezvous(host: str, port: int, network: Network) -> Check:
    """Whether processes could meet at `host:port`, seen from this machine."""
    address, name = resolved(host), "rendezvous"
    if address is None:
        return _unresolved(host, network)
    place = f"{host}:{port} ({address})"
    if _is_loopback(address) or address in sum(network.addresses.values(), ()):
        problem = _listen(address, port)
        if problem is not None:
            return Check(name, "failed", f"{place}, this machine: {problem}", _other_port())
        if _is_loopback(address) and not (_is_loopback(host) or host == "localhost"):
            text = f"{place}: the name stands for loopback here, which other nodes can't reach"
            return Check(name, "warning", text, "give this machine's address in place of its name")
        return Check(name, "ok", f"{place}, this machine: the port is free")
    try:
        with closing(socket.create_connection((address, port), timeout=_CONNECT_S)):
            return Check(name, "ok", f"{place} answers")
    except ConnectionRefusedError:
        text = f"{place} is reached, and nothing listens there yet"
        return Check(name, "warning", text, f"start the run on {host} first")
    except OSError as error:
        text = f"{place} can't be reached ({error})"
        return Check(name, "failed", text, f"open port {port} in the firewall of {host}")


def _unresolved(host: str, network: Network) -> Check:
    fix = f"give the address in place of the name, or add {host} to /etc/hosts on every node"
    return Check("rendezvous", "failed", f"{host} does not resolve on {network.name}", fix)


def _listen(address: str, port: int) -> str | None:
    """Why a process can't listen there, or None."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as listener:
        # As launchers do: a port whose last connection has just ended is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen()
        except OSError as error:
            return f"{error.strerror}"
    return None


def _other_port() -> str:
    with closing(socket.socket()) as listener:
        listener.bind(("", 0))
        free = listener.getsockname()[1]
    return f"choose another port: accelerate launch --main_process_port {free}, on every node"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
