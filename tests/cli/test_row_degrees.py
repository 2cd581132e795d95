"""`longctx patch` chooses degrees for packed documents and for layers with a window."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Run

LLAMA_8B = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
ASKED: dict[tuple[object, ...], tuple[int, int]] = {
    ("--ulysses", 2): (2, 2),
    ("--ring", 2): (2, 2),
    ("--sequence-degree", 4, "--ring", 1): (4, 1),
    ("--sequence-degree", 2): (1, 2),
    ("--cpu",): (4, 1),
}
MISTRAL = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}


@pytest.fixture
def chosen(run: Run, config: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The settings of a run folder for 131,072 tokens, and two rows of its README."""

    def patch(*words: object, model: dict[str, Any] = LLAMA_8B) -> dict[str, Any]:
        out = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        found = run(
            "patch", config(**model), *("--seq-len", 131072, "--gpus", 4, "--out", out), *words
        )
        assert found.exit_code == 0, found.output
        settings: dict[str, Any] = yaml.safe_load((out / "finetune.yaml").read_text())
        lines = (out / "README.md").read_text().split("\n")
        rows = {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("| ")}
        return settings | {"why": rows["degrees"], "step": rows.get("step", "")}

    return patch


def degrees(settings: dict[str, Any]) -> tuple[int, int, str]:
    return settings["ulysses"], settings["ring"], settings["layout"]


def test_causal_rows(chosen: Callable[..., dict[str, Any]]) -> None:
    found = chosen()
    assert degrees(found) == (4, 1, "auto")
    assert "predicted fastest for causal rows on H100" in found["why"]
    assert degrees(chosen(model={**MISTRAL, "sliding_window": 131072})) == (4, 1, "auto")


def test_packed_rows_without_text_are_of_short_documents(
    chosen: Callable[..., dict[str, Any]],
) -> None:
    found = chosen("--pack")
    assert degrees(found) == (1, 4, "auto")
    assert "predicted fastest for rows of 64 documents on H100" in found["why"]
    assert "this assumes documents of 2,048 tokens" in found["why"]


def test_layers_with_a_window_and_full_ones(chosen: Callable[..., dict[str, Any]]) -> None:
    found = chosen(model=MISTRAL)
    assert degrees(found) == (1, 4, "contiguous")
    assert "layers with a window" in found["why"]
    assert chosen("--gpus", "4xH200", model=MISTRAL)["step"].endswith(
        "; a step takes less: attention is counted as plain causal |"
    )
    assert "takes less" not in chosen("--gpus", "4xH200")["step"]
    both = chosen("--pack", model=MISTRAL)["why"]
    assert "for rows of 64 documents and layers with a window on H100" in both


def test_layers_of_chunks_are_counted_as_documents(chosen: Callable[..., dict[str, Any]]) -> None:
    chunks = {**LLAMA_8B, "model_type": "llama4_text", "no_rope_layers": [1, 1]}
    short, long = (
        chosen(model={**chunks, "attention_chunk_size": size}) for size in (1024, 131072)
    )
    assert "for layers of chunks on H100" in short["why"]
    assert degrees(short)[:2] == (1, 4)
    assert "for causal rows on H100" in long["why"]
    assert degrees(long)[:2] == (4, 1)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_what_is_asked_for_stays(
    chosen: Callable[..., dict[str, Any]], asked: tuple[object, ...]
) -> None:
    found = chosen("--pack", *asked)
    assert (found["ulysses"], found["ring"]) == ASKED[asked]
