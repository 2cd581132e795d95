"""The launcher's world: its place, its versions, and real processes that meet or don't."""

import os

import pytest

from longctx_patch.cli.diagnosis.nodes import (
    Member,
    Place,
    _meet,
    check_versions,
    check_world,
    launched,
)
from longctx_patch.transport.processes import run_processes
from tests.meeting import unused_port

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def environment(rank: int, port: int) -> dict[str, str]:
    values = ("2", str(rank), str(rank), "2", "127.0.0.1", str(port))
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    return os.environ | dict(zip(VARIABLES, values, strict=True)) | hidden


def test_the_place_is_what_the_launcher_says(clean: pytest.MonkeyPatch) -> None:
    assert launched() is None
    clean.setenv("WORLD_SIZE", "1")
    assert launched() is None
    for name, value in environment(1, 29512).items():
        clean.setenv(name, value)
    place = launched()
    assert place is not None
    assert (place.rank, place.num_ranks, place.local_rank, place.local_ranks) == (1, 2, 1, 2)
    assert place.meeting == ("127.0.0.1", "29512")
    assert not place.speaks_for_node


def test_half_a_launcher_is_refused(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("WORLD_SIZE", "2")
    clean.setenv("RANK", "0")
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"):
        launched()


def test_other_versions_on_a_rank_fail() -> None:
    def of(rank: int, torch: str) -> Member:
        place = Place(rank, 3, rank, 3, "node", ("node", "29500"))
        return Member(place, (), {"torch": torch, "peft": "0.21"}, has_gpu=False)

    assert check_versions([of(0, "2.13"), of(1, "2.13")]).state == "ok"
    check = check_versions([of(0, "2.13"), of(1, "2.12"), of(2, "2.13")])
    assert check.state == "failed"
    assert check.found == "ranks [0, 2]: peft 0.21, torch 2.13; ranks [1]: peft 0.21, torch 2.12"


def meet(rank: int, port: int) -> tuple[list[Member], str, list[dict[str, float]]]:
    place = Place(rank, 2, rank, 2, "node", ("127.0.0.1", str(port)))
    return _meet(0, Member(place, (), {"torch": "2.13"}, has_gpu=False), 120)


def test_ranks_meet_and_exchange() -> None:
    for members, backend, rates in run_processes(meet, 2, unused_port(), timeout_s=120):
        assert [each.place.rank for each in members] == [0, 1]
        assert (backend, len(rates)) == ("gloo", 2)


def test_a_rank_that_does_not_come_is_reported_and_nobody_waits_for_ever(
    clean: pytest.MonkeyPatch,
) -> None:
    port = str(unused_port())
    clean.setenv("MASTER_ADDR", "127.0.0.1")
    clean.setenv("MASTER_PORT", port)
    mine = Member(Place(0, 2, 0, 2, "node", ("127.0.0.1", port)), (), {}, has_gpu=False)
    members, (check,) = check_world(mine, 2)
    assert members == [mine]
    assert (check.name, check.state) == ("exchange", "failed")
    assert "1/2 clients joined" in check.found or "it hung" in check.found
    assert "NCCL_SOCKET_IFNAME" in check.fix
