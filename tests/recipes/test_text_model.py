"""Recipes train the text model in a checkpoint that reads images too, as if it were one of its own,
and leave a model that transformers loads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longctx_patch.recipes import models, text_model
from tests.hf.seeing import seeing_model
from tests.recipes.conftest import settings_of, write_records
from tests.recipes.data.test_reading import words
from tests.recipes.test_sharded_reading import WHOLE, Ran, arguments, numbers, run_all
from tests.trl.cases import rows


def checkpoint(folder: Path, family: str) -> Path:
    """A checkpoint that reads images, with a tokenizer, and a text beside it."""
    tokenizer = words()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    size = max(97, len(tokenizer))
    seeing_model(family, vocab_size=size, **ends).save_pretrained(folder, max_shard_size="40KB")
    tokenizer.save_pretrained(folder)
    write_records(folder.parent / "texts.jsonl", rows("text", 8, 4))
    return folder


def loads(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that transformers finds there for the model that the config names."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("recipe", "family", "saving"),
    [
        ("finetune", "llama4", ["--save-every", "2"]),
        ("sft", "qwen3_vl", ["--save-strategy", "steps", "--save-steps", "2"]),
    ],
)
def test_two_ranks_train_it_as_a_model_of_its_own(
    recipe: str, family: str, saving: list[str], tmp_path: Path
) -> None:
    """To the last bit, read by rows or whole; also of a run that was resumed."""
    steps = ["--full", "--max-steps", "4"]
    whole, text = checkpoint(tmp_path / "whole", family), tmp_path / "text"
    text_model.main([str(whole), str(text)])
    runs = {
        "rows": arguments(recipe, whole, "rows", *steps, *saving),
        "whole-reading": arguments(recipe, whole, "whole-reading", *steps, *WHOLE),
        "apart": arguments(recipe, text, "apart", *steps),
    }
    away = {3: tmp_path / "rows/checkpoint-4"}
    found = run_all(recipe, *runs.values(), [*runs["rows"], "--resume"], away=away)
    assert found == [[Ran(count, [])] * 2 for count in (1, 0, 1, 1)]
    (wanted, *others) = (tmp_path / name for name in runs)
    assert len({line["loss"] for line in numbers(wanted)[:4]}) == 4
    trained = loads(wanted / "final")
    for other in others:
        assert numbers(other) == numbers(wanted)
        weights = loads(other / "final")
        assert weights.keys() == trained.keys()
        assert all(torch.equal(weights[name], trained[name]) for name in trained)


def test_an_adapter_needs_the_text_model_as_its_base(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "whole", "qwen3_vl")
    settings = settings_of(whole)
    with pytest.raises(ValueError, match=r"is a qwen3_vl.*recipes\.text_model .*whole whole-text"):
        models.load_config(settings)
    text_model.main([str(whole), str(tmp_path / "text")])
    models.load_config(settings_of(tmp_path / "text"))
    with pytest.raises(ValueError, match="holds files"):
        text_model.main([str(whole), str(tmp_path / "text")])
    with pytest.raises(ValueError, match="no checkpoint with a text model in it"):
        text_model.main([str(tmp_path / "text"), str(tmp_path / "again")])
    with pytest.raises(ValueError, match="1 arguments"):
        text_model.main([str(whole)])


def test_weights_in_8_bit_floating_point_are_refused(tmp_path: Path) -> None:
    """Before an adapter is told to take the text model, which can't be written from them."""
    whole = checkpoint(tmp_path / "whole", "mistral3")
    config = json.loads((whole / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (whole / "config.json").write_text(json.dumps(config))
    settings = settings_of(whole)
    refused = (
        r"8-bit floating point .*'fp8'.* can be served but not trained.*"
        r"AutoModelForImageTextToText.from_pretrained\(.*dequantize=True.*'whole-bf16'"
    )
    for given in (settings, replace(settings, full=True)):
        with pytest.raises(ValueError, match=refused):
            models.load_config(given)
    with pytest.raises(ValueError, match=refused):
        text_model.main([str(whole), str(tmp_path / "text")])
