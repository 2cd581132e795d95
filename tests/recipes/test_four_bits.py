"""An adapter over frozen 4-bit weights: a run of the recipe, and refusals.

tests/trainer/test_exactness.py has two ranks against one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, LlamaConfig

from longctx_patch.recipes import finetune, models
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.settings import Settings
from tests.recipes.conftest import flags_of, loaded, settings_of
from tests.tiny_llama import TINY_LLAMA

pytest.importorskip("bitsandbytes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model with random weights, whose tokens are bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(**TINY_LLAMA | {"hidden_size": 128, "intermediate_size": 192})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def settings(model: Path, **values: Any) -> Settings:
    return settings_of(model, **{"load_in_4bit": True, "dtype": "bfloat16", **values})


def test_a_run_trains_goes_on_exactly_and_saves_the_adapter(folder: Path, text_file: Path) -> None:
    output = folder.parent / "out"
    words = flags_of(model=folder, tokenizer="bytes", text=text_file, seq_len=64, max_steps=4)
    words += ["--load-in-4bit", *flags_of(learning_rate=1e-2, save_every=2, output=output)]
    runs = []
    for more in ([], ["--resume"]):
        finetune.main([*words, *more])
        runs.append([(line["loss"], line["grad_norm"]) for line in read_metrics(output)])
        (output / "checkpoint-4/run.json").unlink()  # as if it had stopped at 3
    assert runs[0] == runs[1]
    assert runs[0][-1][0] < runs[0][0][0] - 0.3
    assert (output / "final" / "adapter_model.safetensors").is_file()
    assert not (output / "final" / "model.safetensors").exists()
    kept = FileSystemReader(output / "checkpoint-2/optimizer_state").read_metadata()
    names = {name for name in kept.state_dict_metadata if name.startswith("model.")}
    assert names
    assert all("lora_" in name for name in names)


def test_weights_are_of_four_bits(folder: Path) -> None:
    model = loaded(settings(folder))
    layer = model.get_decoder().layers[0]
    weights = [part.weight for part in (layer.self_attn.q_proj, layer.mlp.down_proj)]
    assert [w.nbytes for w in weights] == [128 * 128 // 2, 128 * 192 // 2]
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16


def test_what_can_not_be_made_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="load_in_4bit with the bare config"):
        models.check_4bit(settings(folder / "config.json"), fsdp=False)
    with pytest.raises(ValueError, match=r"load_in_4bit under FSDP2 is not covered\..*MULTI_GPU"):
        models.check_4bit(settings(folder), fsdp=True)
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="load_in_4bit needs bitsandbytes"):
        models.check_4bit(settings(folder), fsdp=False)
    models.check_4bit(settings(folder, load_in_4bit=False), fsdp=True)
