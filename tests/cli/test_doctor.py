"""`longctx doctor` on this machine, but for its exchange, and of faked faults."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.cli.diagnosis import exchange, packages
from longctx_patch.cli.diagnosis.gpus import Gpu, Gpus
from longctx_patch.cli.diagnosis.nodes import Place
from longctx_patch.cli.diagnosis.packages import Check
from longctx_patch.cli.doctor import Diagnosis, next_command, render
from tests.cli.conftest import Run

GIB = 2**30
NAMES = (
    *("packages", "torch", "gpus", "gpu links", "gpu speed", "link speed"),
    *("attention", "fused layers"),
    *("disk: out", "disk: model cache", "disk: temporary", "disk: shared memory"),
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def checks_of(output: str) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(output)["checks"]}


def test_it_checks_everything(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Check("exchange", "ok", "fine")
    monkeypatch.setattr(exchange, "check_exchange", lambda num_gpus, limit: fine)
    result = run("doctor", "--json", "--limit", 200, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report.keys() == {"ok", "checks", "next"}
    assert report["ok"] is True
    assert [each["name"] for each in report["checks"]] == [*NAMES, "exchange"]
    for each in report["checks"]:
        assert each.keys() == {"host", "name", "state", "found", "fix", "figures"}
        assert each["found"]
        assert bool(each["fix"]) <= (each["state"] in ("warning", "failed"))
    assert report["checks"][-1]["state"] == "ok"


def test_quick_leaves_the_exchange_out(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "check_exchange", None)  # calling it would raise
    result = run("doctor", "--quick", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].split() == ["CHECK", "STATE", "FOUND"]
    assert not any(line.startswith("exchange") for line in result.output.splitlines())
    assert "Next: longctx p" in result.output.splitlines()[-1]


def test_what_fails_is_mended_by_a_command_and_ends_with_1(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = packages.installed()
    assert found is not None
    old = packages.Installed(found.wanted, {**found.versions, "transformers": "4.57.1"})
    monkeypatch.setattr(packages, "installed", lambda: old)
    failing = Check("exchange", "failed", "it hung in ring", "try this")
    monkeypatch.setattr(exchange, "check_exchange", lambda *_, **__: failing)
    result = run("doctor", "--out", tmp_path)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    (wanted,) = (each for each in found.wanted if each.startswith("transformers"))
    assert f'  packages: pip install "{wanted}"' in lines
    assert "  exchange: try this" in lines
    assert lines[-1].startswith("doctor: FAILED: packages, exchange (")
    assert lines[-1].endswith("Mend it, then run: longctx doctor")
    assert json.loads(run("doctor", "--json", "--out", tmp_path).output)["ok"] is False
    result = run("doctor", "--rendezvous", "node1:29500")
    assert result.exit_code == 2
    assert "--rendezvous is gone: under the launcher of the run" in result.output


def test_a_torch_that_does_not_load_is_a_check_and_no_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now raises ImportError
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert checks_of(result.output)["torch"]["fix"] == "pip install torch"


def test_nodes_are_named_where_there_are_several() -> None:
    good, bad = Check("disk", "ok", "fine"), Check("disk", "warning", "slow", "buy one")
    lines = render(Diagnosis([("n1", good), ("n2", bad)], "next"), 3.4).splitlines()
    assert lines[1].split() == ["disk", "(n1)", "ok", "fine"]
    assert "  disk (n2): buy one" in lines
    assert lines[-1] == "doctor: ok, 1 warning(s) (3 s). Next: next"
    assert "n1" not in render(Diagnosis([("n1", good), ("all", good)], "next"), 3.4)


@pytest.mark.parametrize(
    ("name", "gib", "command"),
    [
        ("NVIDIA H200", 139.8, "longctx plan MODEL --gpus 4xH200 --max-seq-len"),
        ("NVIDIA H100 80GB HBM3", 79.2, "longctx plan MODEL --gpus 4xH100 --max-seq-len"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "longctx plan MODEL --gpus 4xA100-40 --max-seq-len"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "longctx plan MODEL --gpus 4xA100 --max-seq-len"),
        ("NVIDIA L40S", 44.5, "longctx plan MODEL --gpus 4xL40S --max-seq-len"),
        ("NVIDIA RTX A6000", 47.5, "longctx plan MODEL --gpus 4xA6000 --max-seq-len"),
        (
            *("NVIDIA RTX 6000 Ada Generation", 47.5),
            "longctx plan MODEL --gpus 4xRTX6000-ADA --max-seq-len",
        ),
        ("NVIDIA GeForce RTX 4090", 23.6, "longctx plan MODEL --gpus 4xRTX4090 --max-seq-len"),
        ("NVIDIA GeForce RTX 4090 D", 23.6, "longctx patch MODEL --seq-len 32768 --gpus 4"),
        ("NVIDIA L4", 22.0, "longctx patch MODEL --seq-len 32768 --gpus 4 --data texts/"),
        ("NVIDIA H100 PCIe", 79.2, "longctx patch MODEL --seq-len 32768 --gpus 4 --data texts/"),
    ],
)
def test_the_next_command_knows_the_gpus(name: str, gib: float, command: str) -> None:
    gpu = Gpu(name, (9, 0), int(gib * GIB), int(gib * GIB))
    found = next_command(Gpus(seen=(gpu,) * 4))
    assert found.startswith(command)
    assert found.endswith(" --max-seq-len") or "(a MODEL that reaches fewer tokens: add" in found
    eight = Place(0, 8, 0, 4, "host", ("address", "port"))  # of two machines
    there = next_command(Gpus(seen=(gpu,) * 4), eight)
    assert "--gpus 8x" in there or "--gpus 8 --nodes 2 --data" in there
    assert "--cpu" in next_command(Gpus())
