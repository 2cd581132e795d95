"""The launcher's world: its place, its versions, and real processes that meet or don't."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.diagnosis.world import Member, Place, check_versions, launched
from tests.meeting import unused_port

DOCTOR = [sys.executable, "-m", "longctx_patch.cli.main", "doctor", "--json"]
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


def test_torchrun_starts_it_and_rank_0_reports_for_all(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc_per_node", "2", "--no-python", *DOCTOR, "--limit", "120"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    checks: dict[str, Any] = {each["name"]: each for each in report["checks"]}
    assert checks["same versions"]["found"] == "on all 2 ranks"
    assert checks["exchange"]["found"].startswith("2 processes on 1 node(s), gloo: numbers are")
    assert len(checks) == len(report["checks"]), "one process of a node looks at the machine"


def test_a_rank_that_does_not_come_is_reported_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DOCTOR, "--limit", "5", "--out", str(tmp_path)],
        env=environment(0, unused_port()),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert not report["ok"]
    check = report["checks"][-1]
    assert (check["name"], check["state"]) == ("exchange", "failed")
    assert "1/2 clients joined" in check["found"] or "it hung" in check["found"]
    assert "NCCL_SOCKET_IFNAME" in check["fix"]
