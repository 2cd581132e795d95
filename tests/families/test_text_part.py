"""Text models of checkpoints that read images too: on text they compute what the whole model does,
and what is saved of them is a model of its own."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText

from longctx_patch import LongContextConfig
from longctx_patch.families.checks import UnsupportedModelError, check_model_config
from longctx_patch.families.load_config import load_model_config
from longctx_patch.families.supported import FAMILIES
from longctx_patch.families.text_part import TEXT_TYPES, auto_class, text_weights
from longctx_patch.plugin import NeedsWholeReading, text_model, unread_model
from longctx_patch.verification.shrink import keep_float64
from tests.hf.seeing import WHOLE, seeing_model, text_rows
from tests.hf.steps import Step, errors, step_of_ranks
from tests.hf.tiny import gradients
from tests.reference import relative_error

TIED = ("qwen3_vl", "gemma3", "mistral3")


def on_text(family: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the whole model takes of rows without images."""
    kinds = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
    kinds["gemma4_unified"] = "mm_token_type_ids"
    zeros = torch.zeros_like(batch["input_ids"])
    return batch | ({kinds[family]: zeros} if family in kinds else {})


def logits_of(whole: Any, family: str, batch: dict[str, Tensor]) -> Tensor:
    """The whole model's, of rows without images."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    given = on_text(family, given)
    if family != "llama4":
        return cast(Tensor, whole(**given, use_cache=False).logits)
    # In transformers 5.24 it fails once it has them, since it asks for outputs of images.
    found: list[Tensor] = []
    hook = whole.language_model.register_forward_hook(lambda *run: found.append(run[-1].logits))
    with hook, suppress(AttributeError):
        whole(**given, use_cache=False)
    (logits,) = found
    return logits


def text_type(whole: Any) -> str:
    """The family of the whole model's text model."""
    config = whole.config
    return TEXT_TYPES[config.model_type] or str(config.get_text_config().model_type)


@pytest.mark.parametrize("family", WHOLE)
def test_on_text_ranks_compute_what_the_whole_model_does(family: str, tmp_path: Path) -> None:
    """Loss and every gradient of the text model in float64, against the stock whole model."""
    whole = seeing_model(family, tied=family in TIED)
    whole.save_pretrained(tmp_path / "whole", max_shard_size="30KB")
    batch, model = text_rows(), text_model(str(tmp_path / "whole"), dtype=torch.float32)
    for each in (model, whole):
        each.train()
        each.set_attn_implementation("eager")
        keep_float64(each)
    config = LongContextConfig(ring_degree=2, checkpoint="attention")
    found = step_of_ranks(model, config, batch)
    logits = logits_of(whole, family, batch)[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    wanted = Step(loss.detach(), text_weights(gradients(whole)))
    assert max(errors(found, wanted).values()) < 1e-10, family


@pytest.mark.parametrize("family", WHOLE)
def test_what_is_saved_is_a_model_of_its_own(family: str, tmp_path: Path) -> None:
    whole = seeing_model(family, tied=family in TIED)
    whole.save_pretrained(tmp_path / "whole")
    model = text_model(str(tmp_path / "whole"))
    assert model.config.model_type == text_type(whole)
    model.save_pretrained(tmp_path / "text")
    assert load_model_config(str(tmp_path / "text")).model_type in FAMILIES
    kind = auto_class(model.config)
    again, info = kind.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(info.values())
    assert type(again) is type(model)
    found, wanted = again.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    # And its weights go back into the checkpoint, as docs/how-to/images.md says.
    back = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.mul_(1.5)
    if family == "llama4":
        back.language_model.load_state_dict(again.state_dict())
    else:
        back.model.language_model.load_state_dict(again.model.state_dict())
        back.lm_head.load_state_dict(again.lm_head.state_dict())
    back.save_pretrained(tmp_path / "back")
    changed = AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    ids = text_rows()["input_ids"]
    with torch.no_grad():
        whole_logits = logits_of(changed, family, {"input_ids": ids})
        assert relative_error(whole_logits, again(input_ids=ids).logits) < 1e-5


@pytest.mark.parametrize("family", WHOLE)
def test_rows_of_weights_are_read_from_the_whole_models_files(family: str, tmp_path: Path) -> None:
    """What is checked of a file before it is read, and what belongs to which weight."""
    seeing_model(family).save_pretrained(tmp_path, max_shard_size="30KB")
    if family == "qwen3_vl_moe":
        with pytest.raises(NeedsWholeReading, match="Transpose"):
            unread_model(str(tmp_path))
        return
    wanted = text_model(str(tmp_path)).state_dict()
    stored = unread_model(str(tmp_path))._longctx_unread.stored
    assert stored.keys() == wanted.keys()
    for name, weight in wanted.items():
        found = torch.empty_like(weight)
        stored[name].read_into(found, 0, weight.dtype)
        assert torch.equal(found, weight), name


def test_a_head_of_which_the_file_says_nothing(tmp_path: Path) -> None:
    """As Mistral Small 3.1 is published: transformers takes it for tied, and finds two weights."""
    whole = seeing_model("mistral3")
    whole.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    del said["tie_word_embeddings"], said["text_config"]["tie_word_embeddings"]
    file.write_text(json.dumps(said))
    model = text_model(str(tmp_path))
    assert torch.equal(model.lm_head.weight, whole.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, whole.get_input_embeddings().weight)
    assert "lm_head.weight" in unread_model(str(tmp_path))._longctx_unread.stored
    assert not load_model_config(str(tmp_path)).tie_word_embeddings
    # Tied by the file alone.
    file.write_text(json.dumps(said | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"embed_tokens.weight and .*lm_head.weight differ"):
        text_model(str(tmp_path))
    said["text_config"] |= {"model_type": "mpt"}
    file.write_text(json.dumps(said))
    with pytest.raises(UnsupportedModelError, match="'mpt' is not supported"):
        check_model_config(load_model_config(str(tmp_path)), LongContextConfig())
