"""Names that do not resolve, ports that are taken, interfaces that do not exist."""

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from longctx_patch.diagnosis import network
from longctx_patch.diagnosis.network import (
    Network,
    check_meeting,
    check_network,
    check_port,
    check_rendezvous,
    parse_place,
    read_network,
)

HERE = Network(
    name="node1",
    addresses={"lo": ("127.0.0.1",), "eth0": ("192.0.2.1",), "ib0": ("192.0.2.9",)},
    name_is="192.0.2.1",
    chosen={},
)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine on which somebody listens."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_port_that_is_taken_or_free(taken: int) -> None:
    assert check_port(taken).state == "warning"
    check = check_rendezvous("127.0.0.1", taken, HERE)
    assert check.state == "failed"
    assert "Address already in use" in check.found
    assert "--main_process_port" in check.fix
    assert check_rendezvous("127.0.0.1", free_port(), HERE).state == "ok"


def test_a_host_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **options: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for check in (check_rendezvous("node7", 29500, HERE), check_meeting("node7", HERE)):
        assert (check.state, check.found) == ("failed", "node7 does not resolve on node1")
        assert "/etc/hosts" in check.fix


def test_a_name_that_stands_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a machine's own name the address 127.0.1.1."""
    monkeypatch.setattr(network, "resolved", lambda host: "127.0.1.1")
    monkeypatch.setattr(network, "_listen", lambda address, port: None)
    check = check_rendezvous("node1", 29500, HERE)
    assert (check.state, "can't reach" in check.found) == ("warning", True)


def test_another_machine(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """Loopback stands for the other machine: nothing else answers here for certain."""
    monkeypatch.setattr(network, "_is_loopback", lambda address: False)
    elsewhere = replace(HERE, addresses={"eth0": ("192.0.2.1",)})
    assert check_rendezvous("127.0.0.1", taken, elsewhere).found.endswith("answers")
    refused = check_rendezvous("127.0.0.1", free_port(), elsewhere)
    assert (refused.state, "start the run on" in refused.fix) == ("warning", True)

    def silent(*args: Any, **options: Any) -> Any:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    check = check_rendezvous("127.0.0.1", 29500, elsewhere)
    assert (check.state, "firewall" in check.fix) == ("failed", True)


@pytest.mark.parametrize("value", ["eth", "eth0", "=ib0", "ib0:1", "^lo", "wlan0,eth0"])
def test_chosen_interfaces_that_exist(value: str) -> None:
    found = replace(HERE, chosen={"NCCL_SOCKET_IFNAME": value})
    assert check_network(found, several_nodes=True).state == "ok"


def test_a_chosen_interface_that_does_not_exist() -> None:
    found = replace(HERE, chosen={"GLOO_SOCKET_IFNAME": "ens5"})
    check = check_network(found, several_nodes=False)
    assert check.state == "failed"
    assert check.fix.endswith("with one of: lo, eth0, ib0")


def test_a_machines_own_name_matters_among_several_nodes() -> None:
    for name_is in (None, "127.0.1.1"):
        found = replace(HERE, name_is=name_is)
        check = check_network(found, several_nodes=True)
        assert (check.state, check.fix) == ("warning", "export GLOO_SOCKET_IFNAME=eth0")
        assert check_network(found, several_nodes=False).state == "ok"
    alone = replace(HERE, addresses={"lo": ("127.0.0.1", "::1")})
    assert check_network(alone, several_nodes=True).state == "failed"
    assert check_network(alone, several_nodes=False).state == "ok"


def test_places() -> None:
    assert parse_place("node1") == ("node1", 29500)
    assert parse_place("node1:4000") == ("node1", 4000)
    assert parse_place("[fe80::1]:4000") == ("fe80::1", 4000)
    for wrong in ("", "node1:", "node1:0", "node1:99999", "a:b:1", ":29500"):
        with pytest.raises(ValueError, match="write a host and a port"):
            parse_place(wrong)


def test_this_machines_network_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    found = read_network()
    assert any("127.0.0.1" in theirs for theirs in found.addresses.values())
    assert found.chosen["NCCL_SOCKET_IFNAME"] == "lo"
    assert "lo" not in found.outward
