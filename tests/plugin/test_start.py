"""gloo is given an interface only where it would take the loopback between machines (as jobs of
tests/recipes/test_several_nodes.py need it), and forked processes wait for each other."""

import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.plugin import start
from longctx_patch.plugin.start import BORN, choose_gloo_interface, wait_for_siblings

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
    monkeypatch.setattr(start, "ELSEWHERE", "elsewhere.invalid")
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


def passes(folder: Path, rank: int, number: int, delay_s: float, passed: Any) -> None:
    """One process of a launch: when it was there, and when it went on."""
    time.sleep(delay_s)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHELASTIC_ERROR_FILE", str(folder / str(rank) / "error.json"))
        patched.setenv("LOCAL_WORLD_SIZE", str(number))
        came = time.monotonic()
        wait_for_siblings()
        passed.put((came, time.monotonic()))


def test_all_wait_for_the_last(tmp_path: Path) -> None:
    context, number = multiprocessing.get_context("fork"), 3
    passed = context.Queue()
    for rank in range(number):
        (tmp_path / str(rank)).mkdir()
    delays = [0.0, 0.4, 0.2]
    started = [
        context.Process(target=passes, args=(tmp_path, rank, number, delay, passed))
        for rank, delay in enumerate(delays)
    ]
    for process in started:
        process.start()
    times = [passed.get(timeout=60) for _ in started]
    for process in started:
        process.join()
    assert min(went for _, went in times) >= max(came for came, _ in times)


def test_one_that_never_comes_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "PATIENCE_S", 0.1)
    (tmp_path / "0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    wait_for_siblings()
    assert (tmp_path / "0" / BORN).exists()
