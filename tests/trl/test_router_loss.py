"""A mixture of experts whose model computes no loss of its router is trained on the loss that it
has, though its config names a weight of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from longctx_patch.trainer.router_loss import has_router_loss
from tests.hf.tiny import featured_model
from tests.trl.cases import Case, make_trainer, write_rows

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
ONE_STEP = {"max_steps": 1, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}


def trainer_of(kind: str, family: str, folder: Path, **arguments: Any) -> Any:
    rows = "text" if kind == "sft" else "pairs"
    case = Case("one", kind, rows, {}, family, layers=3, arguments=ONE_STEP | arguments)
    write_rows([case], folder)
    return make_trainer(case, folder / case.name, is_patched=True)


def stock_loss(model: PreTrainedModel, rows: Any) -> float:
    """The mean over rows of what transformers' model alone gives."""
    with torch.no_grad():
        ids = [torch.tensor([row["input_ids"]]) for row in rows]
        losses = [model.eval()(input_ids=each, labels=each).loss for each in ids]
    return float(torch.stack(losses).mean())


def test_llama4_is_trained_on_its_own_loss(tmp_path: Path) -> None:
    trainer = trainer_of("sft", "llama4_text", tmp_path)
    stock = featured_model("llama4_text")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        stock_loss(stock, trainer.eval_dataset), rel=1e-5
    )
    trainer.train()
    learned = trainer.long_context_handle.model
    assert learned.config.router_aux_loss_coef > 0  # as in the checkpoint
    assert not learned.config.output_router_logits
    trainer.unpatch()


def test_llama4_learns_preferences(tmp_path: Path) -> None:
    trainer = trainer_of("dpo", "llama4_text", tmp_path)
    trainer.train()
    trainer.unpatch()


def test_a_weight_of_a_loss_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"coef=0.1: a Llama4ForCausalLM has no loss of its router"
    ):
        trainer_of("sft", "llama4_text", tmp_path, router_aux_loss_coef=0.1)


def test_a_loss_that_is_there_is_kept(tmp_path: Path) -> None:
    trainer = trainer_of("sft", "mixtral", tmp_path, router_aux_loss_coef=0.1)
    assert has_router_loss(trainer.long_context_handle.model)
    assert trainer.aux_loss_enabled
    assert trainer.router_aux_loss_coef == 0.1
    trainer.unpatch()
