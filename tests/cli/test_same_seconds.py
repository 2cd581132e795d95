"""Every command predicts the same seconds for the same step and attention on the same machine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx_patch.cli.decisions import PatchOptions, decide
from longctx_patch.cli.patch import patch_command
from longctx_patch.planner.search import Result
from tests.cli.conftest import Run
from tests.planner.jobs import LLAMA_8B

TOKENS, LAYERS = 131072, 32


def scheduled_s(run: Run, model: Path, kind: str, degrees: tuple[int, int]) -> float:
    words = ["--plan", "auto", "--ranks", degrees[0] * degrees[1], "--ulysses", degrees[0]]
    words += ["--hardware", kind, "--seq-len", TOKENS, "--json", model]
    ways = [run("schedule", *words, "--direction", way) for way in ("forward", "backward")]
    return sum(float(json.loads(result.stdout)["makespan_s"]) for result in ways)


def planned_s(run: Run, model: Path, gpus: str) -> tuple[float, tuple[int, int]]:
    """Seconds of a layer, and degrees, of the best candidate over all GPUs that keeps attention."""
    found = json.loads(run("plan", model, "--gpus", gpus, "--seq-len", TOKENS, "--json").stdout)
    every = [c for c in found["candidates"] if f"{c['sp']}x" in gpus and c["attention_kept"] == 1]
    best = next(c for c in every if c["checkpoint"] == "attention")
    return best["parts_s"]["attention"] / LAYERS, (best["ulysses"], best["ring"])


def patched(model: Path, out: Path, gpus: str, checkpoint: str) -> Result:
    """What is predicted of the run that `longctx patch` writes."""
    words = [str(model), "--gpus", gpus, "--seq-len", str(TOKENS), "--out", str(out)]
    words += ["--tokenizer", "bytes", "--checkpoint", checkpoint]
    options = patch_command.make_context("patch", words).params
    predicted = decide(options.pop("model"), PatchOptions(**options)).sharing.predicted
    assert predicted is not None
    return predicted


@pytest.mark.parametrize("kind", ["h200", "a100"])
def test_every_command_predicts_the_same_attention(
    run: Run, config: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    model = config(**LLAMA_8B, max_position_embeddings=TOKENS)
    planned, degrees = planned_s(run, model, f"4x{kind}")
    predicted = patched(model, tmp_path / "run", f"4x{kind}", "attention")
    assert predicted.time.attention / LAYERS == pytest.approx(planned)
    assert scheduled_s(run, model, kind, degrees) == pytest.approx(planned)


def test_plan_and_patch_take_the_same_tiles(
    run: Run, config: Callable[..., Path], tmp_path: Path
) -> None:
    """`longctx plan` also tried whole MLPs: its seconds were not those of its next command."""
    model = config(**LLAMA_8B, max_position_embeddings=TOKENS)
    words = ("--gpus", "1xH200", "--seq-len", TOKENS, "--json")
    (best, *_) = json.loads(run("plan", model, *words).stdout)["candidates"]
    found = patched(model, tmp_path / "run", "1xH200", best["checkpoint"])
    assert best["mlp_tiles"] == found.candidate.mlp_tiles > 1
    assert (best["step_s"], best["peak_gib"]) == (found.time.total, found.memory.total / 2**30)
