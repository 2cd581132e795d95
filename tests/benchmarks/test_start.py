"""start.py at a tiny size: two starts of a run folder over a checkpoint that it writes."""

from pathlib import Path

import pytest
import start
import torch
from transformers import AutoModelForCausalLM

SIZES = "--model tiny --layers 2 --tokens 64 --cpu --starts 2"


@pytest.mark.timeout(300)
def test_stages_of_two_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "start"
    one, other = start.main(["--folder", str(folder), *SIZES.split(), "--", "--rank", "4"])
    assert one["loss"] == other["loss"] > 0
    for each in (one, other):
        stages = dict(each["seconds"])
        assert stages.pop("first step") > 0
        assert stages.pop("weights") > 0
        assert each["beside weights"] == pytest.approx(sum(stages.values()))
    assert "rank: 4" in (folder / "run/finetune.yaml").read_text()
    printed = capsys.readouterr().out.splitlines()
    assert printed[2] == "| stage | 1 | 2 |"
    assert (
        f"| beside weights | {one['beside weights']:.1f} | {other['beside weights']:.1f} |"
        in (printed[-1])
    )


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
