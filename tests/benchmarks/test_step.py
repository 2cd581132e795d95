"""step.py: systems are compared with one process, then timed."""

import json
import os
from pathlib import Path
from typing import Any

import launch
import launches
import operators
import pytest
import step
import step_floor_job
import step_job
import torch
from config_text import config_of, name_of, options_of
from measure import Clock
from model_shapes import model_shape, sizes_of
from report import read_lines
from systems import Job, take
from systems.ours import Ours

from tests.harness import run_distributed

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_gpus", [1, 4])
def test_default_systems_of_ours_have_options_that_exist(num_gpus: int) -> None:
    ours = [name for name in step.default_systems(num_gpus) if name.startswith("ours:")]
    layers = []
    for name in ours:
        options = options_of(name.removeprefix("ours:"))
        layers.append(options.pop("layers", "none"))
        assert config_of(name_of(options)).sequence_degree == num_gpus
    assert {*layers} == {"none", "liger", "compile"}


TINY = {"model": "tiny", "num_layers": 2}


def run_step_of_two(rank: int, settings: dict[str, Any]) -> None:
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # the group exists already
    Ours.close = lambda self: None  # type: ignore[method-assign]  # the harness ends the group
    run_step(rank, 2, settings)


def run_step(rank: int, num_ranks: int, settings: dict[str, Any]) -> None:
    step_job.run(Job(CPU, rank, num_ranks, model_shape(TINY)), settings)


def step_settings(system: str, lines: Path, expected: dict[str, float]) -> dict[str, Any]:
    return TINY | {
        "system": system,
        "tokens": [32, 48],
        "check_tokens": 24,
        "steps": 2,
        "profile": False,
        "expected_losses": expected,
        "lines": str(lines),
    }


def test_a_step_of_ours_over_two_processes(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    settings = step_settings("ours:ulysses=2,checkpoint=attention,rows=true", lines, {"48": 9.0})
    run_distributed(run_step_of_two, 2, settings)
    timed, wrong = read_lines(lines)
    assert (timed["status"], timed["num_tokens"]) == ("ok", 32)
    assert 0 < timed["p20_s"] <= timed["seconds"] <= timed["p80_s"]
    assert timed["tokens_per_s_per_gpu"] == pytest.approx(16 / timed["seconds"])
    flops = 6 * model_shape(TINY).active_weights * 32 + 6 * 2 * 32 * 32 * 64
    speed = timed["model_tflops_per_s_per_gpu"]
    assert speed == pytest.approx(flops / 2 / timed["seconds"] * 1e-12)
    assert len(timed["losses"]) == 2 + 2
    assert max(timed["check"]["differences"].values()) < 1e-4
    assert len(timed["check"]["differences"]) == 1 + 2 * 2
    # A system whose loss differs from the expected one is reported without a time.
    assert (wrong["status"], wrong["num_tokens"]) == ("wrong", 48)
    assert "seconds" not in wrong
    assert "ours 9" in wrong["reason"]


def test_rows_side_by_side_count_each_and_an_adapters_gradients_are_not_compared(
    tmp_path: Path,
) -> None:
    lines = tmp_path / "lines"
    run_distributed(run_step_of_two, 2, step_settings("ours:lora=true", lines, {}))
    timed = read_lines(lines)[0]
    assert timed["tokens_per_s_per_gpu"] == pytest.approx(32 / timed["seconds"])
    ((name, difference),) = timed["check"]["differences"].items()
    assert name == "loss"
    assert difference < 1e-4


def test_flops_of_models_of_several_kinds_of_layers() -> None:
    """By hand, from the sizes of their layers. Of latent attention the planner knows too little."""
    mlp, compressed = 3 * 7168 * 18432, 7168 * (1536 + 512 + 64)
    expanded = 1536 * 128 * 192 + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    linear = 2 * (mlp + compressed + expanded) + 129280 * 7168
    latent = sizes_of({"model": "deepseek-v3-dense", "num_layers": 2})
    assert latent.active_weights == linear
    assert latent.step_flops(10) == 6 * linear * 10 + 3 * 100 * 2 * 128 * (192 + 128)

    delta_net = 4096 * (8192 + 4096 + 32 + 32) + 4096 * 4096
    attention = 4096 * (2 * 16 + 2 * 4) * 256 + 16 * 256 * 4096
    linear = 3 * delta_net + attention + 4 * 3 * 4096 * 12288 + 248320 * 4096
    hybrid = sizes_of({"model": "qwen3.5-9b", "num_layers": 4})
    assert hybrid.active_weights == linear
    # A recurrence in chunks of 64 tokens: see `run_flops`.
    recurrence = 3 * 32 * (6 * 64 * 128 + 4 * 64 * 128 + 6 * 128 * 128)
    assert hybrid.step_flops(10) == 10 * (6 * linear + 3 * recurrence) + 3 * 100 * 16 * 512

    delta_net = 2048 * (8192 + 4096 + 32 + 32) + 4096 * 2048
    attention = 2048 * (2 * 16 + 2 * 2) * 256 + 16 * 256 * 2048
    experts = 2048 * 256 + (8 + 1) * 3 * 2048 * 512 + 2048  # one is everybody's, with a gate
    linear = 3 * delta_net + attention + 4 * experts + 248320 * 2048
    mixture = sizes_of({"model": "qwen3.5-35b-a3b", "num_layers": 4})
    assert mixture.active_weights == linear
    assert mixture.step_flops(10) == 10 * (6 * linear + 3 * recurrence) + 3 * 100 * 16 * 512


FAKE_SYSTEM = """
from systems import stock

def build(job, model, options):
    system = stock.build(job, model, {})
    backward = system.backward
    system.backward = lambda loss: backward(loss * options["scale"])
    return system
"""


def test_step_reports_wrong_gradients_and_times_right_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fake_systems"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scaled.py").write_text(FAKE_SYSTEM)
    monkeypatch.syspath_prepend(str(tmp_path))

    def in_this_process(script: Path, arguments: list[str], *_: object) -> launch.Ending:
        run_step(0, 1, json.loads(Path(arguments[0]).read_text()))
        return launch.Ending(1.0, None)

    monkeypatch.setattr(launches, "run_job", in_this_process)
    systems = ["fake_systems.scaled:scale=2", "fake_systems.scaled:scale=1", "accelerate_cp"]
    options = f"--out {tmp_path} --gpus 1 --model tiny --num-layers 2 --tokens 32 --check-tokens 24"
    step.main([*options.split(), *["--steps", "2", "--no-floor", "--systems"], *systems])
    wrong, right, not_covered = read_lines(tmp_path / "step.jsonl")
    assert wrong["status"] == "wrong"
    assert "v_proj.weight of 24 tokens" in wrong["reason"]
    assert "off by 1, allowed" in wrong["reason"]
    assert "seconds" not in wrong
    assert right["status"] == "ok"
    assert right["speedup_over_best_peer"] == 1.0
    assert not_covered["status"] == "not covered"
    assert "off by 1, allowed" in (tmp_path / "step.md").read_text()


def test_packages_of_one_system() -> None:
    assert step.without_packages("alst") == ("alst", None)
    assert step.without_packages("alst:packages=/x") == ("alst", "/x")
    assert step.without_packages("alst:loss=trl,packages=/x,liger=true") == (
        "alst:loss=trl,liger=true",
        "/x",
    )


def test_floor_and_flops_of_the_llama_shape() -> None:
    """A measured step of 131,072 tokens on four H200 was compared with these figures."""
    shape = model_shape({"model": "llama-8b", "num_layers": 8})
    assert shape.active_weights == 8 * 218_103_808 + 128256 * 4096
    assert shape.step_flops(131072) / 2.56 / 4 * 1e-12 == pytest.approx(505, rel=0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"los": "trl"}, "this system has checkpoint, liger"), ({"checkpoint": "ful"}, "full, none")],
)
def test_options_of_systems_are_never_taken_for_others(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        take(options, checkpoint=("full", "none"), liger=(False, True))
    assert take({"liger": True}, checkpoint=("full", "none"), liger=(False, True)) == {
        "checkpoint": "full",
        "liger": True,
    }


def test_a_floor_without_any_kernel_says_why() -> None:
    """On the CPU cuDNN, the only kernel allowed, can't run."""
    device = torch.device("cpu")
    job = operators.Job(device, 0, 1, {"ideal_kernels": ["cudnn"]})
    floor = step_floor_job.measure(TINY, 32, job, Clock(device, 1), rate=1e12)
    assert (floor["status"], floor["seconds"]) == ("failed", None)
    assert floor["reason"] == "cudnn: needs device cuda, tensors are on cpu"
