"""recurrence.py: what recurrent layers take, once their segments were compared with the whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recurrence
import torch
from report import read_lines


def test_every_part_of_every_layer_is_timed(tmp_path: Path) -> None:
    small = [
        recurrence.Layer("delta", "delta rule", 2, 8, 8, 2),
        recurrence.Layer("space", "state space", 4, 8, 4, 2),
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recurrence, "LAYERS", small)
        patched.setattr(recurrence, "CHECK_TOKENS", 400)
        recurrence.main(["--out", str(tmp_path), "--tokens", "64", "--iterations", "1"])
    rows = read_lines(tmp_path / "recurrence.jsonl")
    found = {(row["layer"], row["part"], row["direction"]) for row in rows}
    parts = ("whole", "from_state", "map", "heads")
    assert found == {
        (layer, part, direction)
        for layer in ("delta", "space")
        for part in parts
        for direction in ("forward", "both")
    }
    assert {row["by"] for row in rows} == {"torch"}
    assert max(row["check_error"] for row in rows) < 1e-5
    assert "| delta | 64 | map | both |" in (tmp_path / "recurrence.md").read_text()


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = recurrence.Layer("delta", "delta rule", 2, 8, 8, 2)
    stock: Callable[..., Any] = recurrence.kernel_of("delta rule")

    def forgets_states(*args: Any, **options: Any) -> Any:
        return stock(*args, **(options | {"initial_state": None}))

    monkeypatch.setattr(recurrence, "kernel_of", lambda _: forgets_states)
    monkeypatch.setattr(recurrence, "CHECK_TOKENS", 400)
    with pytest.raises(RuntimeError, match="delta: segments differ from the whole"):
        recurrence.check(layer, torch.device("cpu"))
