"""The README of a run folder says who reads the weights, and what CPU memory holds of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.cli.conftest import Run

ROWS = (
    "While loading, each process reads its own rows of the weights from safetensors onto its GPU."
)
KEPT = ROWS.replace("onto its GPU", "into CPU memory, where they stay")
WHOLE = "every process holds the whole model in {} in CPU memory: "
PICKLED = ", since it has no weights in safetensors (`save_pretrained` writes them)."


@pytest.mark.parametrize(
    ("weights", "words", "said"),
    [
        ("safetensors", ["--gpus", "2"], [ROWS]),
        ("safetensors", ["--gpus", "2", "--full", "--states-on-host"], [KEPT]),
        ("bin", ["--gpus", "2"], ["While loading, " + WHOLE.format("float32"), PICKLED]),
        ("none", ["--gpus", "2"], ["process 0 draws the random weights and holds them in CPU"]),
        (
            "none",
            ["--gpus", "2", "--full"],
            ["process 0 draws the random weights on its GPU, a la"],
        ),
        ("safetensors", ["--gpus", "2", "--cpu"], ["While it runs, " + WHOLE.format("float32")]),
        (
            "safetensors",
            ["--gpus", "2", "--load-in-4bit"],
            ["every process reads the whole model and quantises it on its GPU, weight by weight."],
        ),
        (
            "safetensors",
            ["--gpus", "2", "--full", "--dpo"],
            [ROWS + " DPO's reference, a second model, is read and sharded in the same way."],
        ),
        ("safetensors", ["--gpus", "2", "--dpo"], [ROWS]),
    ],
)
def test_who_reads_the_weights(
    weights: str,
    words: list[str],
    said: list[str],
    run: Run,
    config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = config()
    if weights == "safetensors":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent))
        model.save_pretrained(path.parent)
    elif weights == "bin":
        torch.save({}, path.parent / "pytorch_model.bin")
    given = path if weights == "none" else path.parent
    usual = ["--seq-len", "64", "--tokenizer", "bytes", "--out", tmp_path / "run"]
    done = run("patch", given, *usual, *words)
    assert done.exit_code == 0, done.output
    readme = (tmp_path / "run" / "README.md").read_text()
    for line in said:
        assert line in readme
    assert readme.count("whole model in") == sum("whole model in" in line for line in said)


def test_quantised_weights_are_read_whole(
    run: Run, config: Callable[..., Path], tmp_path: Path
) -> None:
    path = config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    save_file({"w": torch.zeros(1)}, path.parent / "model.safetensors")
    words = ["--seq-len", "64", "--tokenizer", "bytes", "--gpus", "2", "--out", tmp_path / "run"]
    done = run("patch", path.parent, *words)
    assert done.exit_code == 0, done.output
    assert ", since its weights are quantised." in (tmp_path / "run" / "README.md").read_text()
    assert json.loads(path.read_text())["quantization_config"]
