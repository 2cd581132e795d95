"""start.py at a tiny size: stages of two starts, and the checkpoint that it writes."""

import json
from pathlib import Path

import pytest
import start
import torch
from transformers import AutoModelForCausalLM

SIZES = "--model tiny --layers 2 --tokens 64 --cpu --starts 2"


def fake_longctx(command: str, target: str, *words: str) -> None:
    """Writes what a start leaves, in place of `longctx`."""
    if command == "train":
        output = Path(target) / "training"
        output.mkdir(parents=True)
        seconds = {"imports": 2.0, "weights": 3.0, "first step": 1.0}
        (output / start.START_FILE).write_text(json.dumps({"seconds": seconds}))
        (output / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 0.5}) + "\n")


def test_stages_of_two_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "longctx", fake_longctx)
    starts = start.main(["--folder", str(tmp_path / "start"), *SIZES.split()])
    assert [(each["loss"], each["beside weights"]) for each in starts] == [(0.5, 2.0)] * 2
    printed = capsys.readouterr().out.splitlines()
    assert printed[2] == "| stage | 1 | 2 |"
    assert printed[-1] == "| beside weights | 2.0 | 2.0 |"


def test_the_checkpoint_is_whole(tmp_path: Path) -> None:
    config = start.model_config("llama-1b", 2, 64)  # its head is its embedding
    for name, size in (("hidden_size", 256), ("intermediate_size", 512), ("vocab_size", 5000)):
        setattr(config, name, size)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 64
    size = start.write_files(tmp_path, config, start.write_random)
    model, said = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values()), said
    weights = dict(model.named_parameters())
    assert size == sum(weight.nbytes for weight in weights.values())
    assert all((weight == 1).all() for name, weight in weights.items() if "norm" in name)
    matrices = [weight for name, weight in weights.items() if "norm" not in name]
    assert all(weight.dtype == torch.bfloat16 for weight in matrices)
    assert all(weight.std().item() == pytest.approx(0.02, rel=0.01) for weight in matrices)
