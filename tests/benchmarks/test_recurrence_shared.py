"""recurrence_shared.py: ways to share a recurrence, each compared with one rank and then timed."""

from pathlib import Path
from typing import Any

import pytest
import recurrence_shared
import torch
from recurrence import Layer
from report import read_lines

from longctx_patch.engine.chain.recurrence import Recurrence
from longctx_patch.processes import ProcessesFailedError
from tests.harness import run_distributed

SMALL = [Layer("delta", "delta rule", 4, 8, 8, 4), Layer("space", "state space", 4, 8, 4, 2)]


def time_small_layers(rank: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recurrence_shared, "LAYERS", SMALL)
        patched.setattr(recurrence_shared, "CHECK_TOKENS", 100)
        patched.setattr(recurrence_shared, "start", lambda: torch.device("cpu"))
        patched.setattr(recurrence_shared, "finish", lambda: None)
        recurrence_shared.main(["--out", folder, "--tokens", "128", "--iterations", "1"])


def test_every_way_is_timed(tmp_path: Path) -> None:
    run_distributed(time_small_layers, 2, str(tmp_path))
    rows = read_lines(tmp_path / "recurrence_shared.jsonl")
    assert {(row["layer"], row["way"], row["direction"]) for row in rows} == {
        (layer.name, way, direction)
        for layer in SMALL
        for way in ("states", "heads")
        for direction in ("forward", "both")
    }
    assert max(row["check_error"] for row in rows) < 1e-4
    assert {(row["num_ranks"], row["num_tokens"]) for row in rows} == {(2, 128)}
    text = (tmp_path / "recurrence_shared.md").read_text()
    assert "| delta | 2 | 128 | states | both |" in text


def refuse_uneven(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recurrence_shared, "start", lambda: torch.device("cpu"))
        with pytest.raises(ValueError, match="--tokens 129: 2 ranks share a row in equal shards"):
            recurrence_shared.main(["--out", "nowhere", "--tokens", "128", "129"])


def test_rows_that_ranks_cannot_share_evenly_are_refused() -> None:
    run_distributed(refuse_uneven, 2)


class NoNumber(torch.autograd.Function):
    """Its gradient is not a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.nan)


def check_a_wrong_way(rank: int, wrong: str) -> None:
    def forgets(num_tokens: int, device: torch.device) -> recurrence_shared.Run:
        return lambda each: recurrence_shared.run_whole(each, each.inputs[0].shape[1])

    def no_number(num_tokens: int, device: torch.device) -> recurrence_shared.Run:
        run = recurrence_shared.by_states(num_tokens, device)

        def spoilt(each: Recurrence) -> torch.Tensor:
            first, second, *others = each.inputs
            return run(each.with_inputs([first, NoNumber.apply(second), *others]))

        return spoilt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recurrence_shared, "CHECK_TOKENS", 100)
        patched.setattr(
            recurrence_shared,
            "WAYS",
            {"states": {"forgets": forgets, "no number": no_number}[wrong]},
        )
        recurrence_shared.check("states", SMALL[0], torch.device("cpu"))


@pytest.mark.parametrize("wrong", ["forgets", "no number"])
def test_a_way_that_is_wrong_is_not_timed(wrong: str) -> None:
    with pytest.raises(ProcessesFailedError, match="states of delta differs from one rank"):
        run_distributed(check_a_wrong_way, 2, wrong)
