"""What a run folder says of positions, which some models or some of their layers don't see."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run, run
from tests.hf.tiny import SUPPORTED, featured_model

__all__ = ["run"]  # a fixture


NONE = "the model's attention sees no positions"
SAID = {
    "nemotron_h": NONE,
    "kimi_linear": NONE,
    "beam": "as published (no positions and default), long enough",
    "gemma3_text": "as published (linear and default), long enough",
}


@pytest.mark.parametrize(
    ("family", "said"), [(name, said) for name, said in SAID.items() if name in SUPPORTED]
)
def test_models_with_and_without_positions(
    run: Run, tmp_path: Path, text_file: Path, family: str, said: str
) -> None:
    featured_model(family, vocab_size=260).config.save_pretrained(tmp_path / "model")
    place = tmp_path / "model" / "config.json"
    words = ("--seq-len", 256, "--gpus", 2, "--cpu", "--full", "--data", text_file)
    result = run("patch", place, *words, "--tokenizer", "bytes", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.output.splitlines() if line.strip().startswith("rope")]
    assert row.endswith(said)
