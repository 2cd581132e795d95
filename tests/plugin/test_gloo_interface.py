"""gloo is given an interface only where it would take the loopback between machines.

tests/recipes/test_several_nodes.py runs jobs that need it, and take both ways to find it.
"""

import os
import socket

import pytest

from longctx_patch.plugin import gloo_interface
from longctx_patch.plugin.gloo_interface import choose_gloo_interface

FOUR_IN_TWO = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
ANY = "0.0.0.0"
"""Can be bound everywhere, and is no loopback address."""


@pytest.fixture(autouse=True)
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of two processes; this one's name leads to 127.0.1.1, the first's nowhere."""
    for name, value in (FOUR_IN_TWO | {"MASTER_ADDR": "first.invalid"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")  # so that it is taken back afterwards
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(gloo_interface, "ELSEWHERE", "elsewhere.invalid")
    own_name_leads_to(monkeypatch, "127.0.1.1")


def own_name_leads_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize(
    ("names", "own"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, "127.0.1.1"),
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.1.1"),
        ({"MASTER_ADDR": "localhost"}, "127.0.1.1"),
        ({"GLOO_SOCKET_IFNAME": "ib7"}, "127.0.1.1"),
        ({}, ANY),
    ],
)
def test_left_alone(names: dict[str, str], own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine, a choice of the user's, and a machine whose name leads to a real address."""
    own_name_leads_to(monkeypatch, own)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    choose_gloo_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == names.get("GLOO_SOCKET_IFNAME")


def test_no_way_to_other_machines() -> None:
    with pytest.raises(ValueError, match=r"MASTER_ADDR=first\.invalid .*Set GLOO_SOCKET_IFNAME"):
        choose_gloo_interface()
