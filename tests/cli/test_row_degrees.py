"""`longctx patch` chooses degrees for packed documents and for layers with a window."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Run

LLAMA_8B: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
MISTRAL = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}
CHUNKS = {**LLAMA_8B, "model_type": "llama4_text", "no_rope_layers": [1, 1]}
CHOICES: list[tuple[dict[str, Any], str, str, str]] = [
    (LLAMA_8B, "", "4 x 1 auto", "predicted fastest for causal rows on H100"),
    (MISTRAL | {"sliding_window": 131072}, "", "4 x 1 auto", "causal rows"),
    (LLAMA_8B, "--pack", "1 x 4 auto", "for rows of 64 documents on H100; this assumes documents"),
    (MISTRAL, "", "1 x 4 contiguous", "layers with a window"),
    (MISTRAL, "--pack", "1 x 4 auto", "for rows of 64 documents and layers with a window on H100"),
    (CHUNKS | {"attention_chunk_size": 1024}, "", "1 x 4 auto", "for layers of chunks on H100"),
    (CHUNKS | {"attention_chunk_size": 131072}, "", "4 x 1 auto", "for causal rows on H100"),
    (LLAMA_8B, "--pack --ulysses 2", "2 x 2 auto", "as asked"),
    (LLAMA_8B, "--pack --ring 2", "2 x 2 auto", "as asked"),
    (LLAMA_8B, "--pack --sequence-degree 4 --ring 1", "4 x 1 auto", "as asked"),
    (LLAMA_8B, "--pack --sequence-degree 2", "1 x 2 auto", "predicted fastest"),
    (LLAMA_8B, "--pack --cpu", "4 x 1 auto", "Ulysses as far as it divides"),
]


@pytest.fixture
def chosen(run: Run, config: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """(degrees and layout, the README) of a run folder for 131,072 tokens."""

    def patch(model: dict[str, Any], *words: str) -> tuple[str, str]:
        asked = ("--seq-len", 131072, "--gpus", 4, "--out", out := tmp_path / "run", *words)
        found = run("patch", config(**model), *asked)
        assert found.exit_code == 0, found.output
        settings: dict[str, Any] = yaml.safe_load((out / "finetune.yaml").read_text())
        degrees = f"{settings['ulysses']} x {settings['ring']} {settings['layout']}"
        return degrees, (out / "README.md").read_text()

    return patch


@pytest.mark.parametrize(("model", "words", "degrees", "why"), CHOICES)
def test_degrees(
    chosen: Callable[..., tuple[str, str]],
    model: dict[str, Any],
    words: str,
    degrees: str,
    why: str,
) -> None:
    found, readme = chosen(model, *words.split())
    assert found == degrees
    (row,) = (line for line in readme.splitlines() if line.startswith("| degrees |"))
    assert why in row


@pytest.mark.parametrize(("model", "is_less"), [(MISTRAL, True), (LLAMA_8B, False)])
def test_a_window_takes_less_than_is_predicted(
    chosen: Callable[..., tuple[str, str]], model: dict[str, Any], is_less: bool
) -> None:
    _, readme = chosen(model, "--gpus", "4xH200")
    assert ("; a step takes less: attention is counted as plain causal |" in readme) == is_less
