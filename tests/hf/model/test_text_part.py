"""Text models of checkpoints that read images too: on text they compute what the whole model does,
and what is saved of them is a model of its own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from longctx_patch import LongContextConfig, patch, run_virtual_ranks, virtual_group
from longctx_patch.hf.model.family import RECURRENT
from longctx_patch.hf.model.load import load_model_config
from longctx_patch.hf.model.supported import FAMILIES
from longctx_patch.hf.model.text_part import TEXT_TYPES, text_weights
from longctx_patch.plugin import NeedsWholeReading, text_model, unread_model
from longctx_patch.transport import VirtualTransport
from longctx_patch.verification.shrink import keep_float64
from tests.hf.float64 import backward, stock_loss
from tests.hf.seeing import WHOLE, seeing_model, text_rows
from tests.hf.tiny import gradients
from tests.reference import relative_error


def on_text(family: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the whole model takes of rows without images."""
    kinds = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
    kinds["gemma4_unified"] = "mm_token_type_ids"
    zeros = torch.zeros_like(batch["input_ids"])
    return batch | ({kinds[family]: zeros} if family in kinds else {})


@pytest.mark.parametrize("family", WHOLE)
def test_on_text_ranks_compute_what_the_whole_model_does(family: str, tmp_path: Path) -> None:
    """Loss and every gradient of the text model in float64, against the stock whole model, and in
    float32; what is saved is loaded by transformers to the last bit."""
    whole = seeing_model(family, tied=family in ("qwen3_vl", "gemma3"))
    whole.save_pretrained(tmp_path / "whole", max_shard_size="30KB")
    config = LongContextConfig(ring_degree=2, checkpoint="attention")
    batch = text_rows()
    bounds = {torch.float64: 1e-10, torch.float32: 1e-5}
    if {*FAMILIES[TEXT_TYPES[family]].features} & {*RECURRENT}:
        del bounds[torch.float32]  # in which gradients of their decays keep few digits
    for dtype, bound in bounds.items():
        models = [text_model(str(tmp_path / "whole"), dtype=torch.float32) for _ in range(2)]
        stock = copy.deepcopy(whole)
        for model in (*models, stock):
            model.train()
            model.set_attn_implementation("eager")
            if dtype == torch.float64:
                keep_float64(model)

        def on_one_rank(
            transport: VirtualTransport, models: list[Any] = models
        ) -> dict[str, Tensor]:
            model = models[transport.group_rank]
            patch(model, config, group=virtual_group(transport, config))
            return backward(model(**batch).loss, model)

        loss = stock_loss(stock, on_text(family, batch))
        loss.backward()
        wanted = {"loss": loss.detach()} | text_weights(gradients(stock))
        ranks = run_virtual_ranks(2, on_one_rank)
        assert all(rank.keys() == wanted.keys() for rank in ranks)
        for name, value in wanted.items():
            found = torch.stack([rank[name] for rank in ranks]).mean(0)
            error = relative_error(found, value)
            assert error < bound, f"{family}, {dtype}: {name} differs by {error:.1e}"


@pytest.mark.parametrize("family", WHOLE)
def test_what_is_saved_is_a_model_of_its_own(family: str, tmp_path: Path) -> None:
    whole = seeing_model(family, tied=family in ("qwen3_vl", "gemma3"))
    whole.save_pretrained(tmp_path / "whole")
    model = text_model(str(tmp_path / "whole"))
    assert model.config.model_type == TEXT_TYPES[family]
    model.save_pretrained(tmp_path / "text")
    assert load_model_config(str(tmp_path / "text")).model_type in FAMILIES
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
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
    back.model.language_model.load_state_dict(again.model.state_dict())
    back.lm_head.load_state_dict(again.lm_head.state_dict())
    back.save_pretrained(tmp_path / "back")
    changed = AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    ids = text_rows()["input_ids"]
    with torch.no_grad():
        given = on_text(family, {"input_ids": ids})
        assert relative_error(changed(**given).logits, again(input_ids=ids).logits) < 1e-5


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
