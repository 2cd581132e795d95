"""Liger's layers, switched on by the trainer's own argument, under the mixin on one GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.models.llama import modeling_llama

from longctx_patch import LongContextConfig, LongContextTrainer
from tests.hf.tiny import tiny_model, token_rows

pytestmark = pytest.mark.gpu

STEPS = 4


@pytest.fixture(autouse=True)
def rotary_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the stock function after the test: Liger's would stay in the modeling file."""
    stock = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", stock)


def logged(folder: Path, *, liger: bool) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: LongContextTrainer with Liger, or the stock Trainer."""
    torch.manual_seed(0)
    model: Any = tiny_model(head_dim=64)
    rows = [{**row, "labels": row["input_ids"]} for row in token_rows(1021, 2 * STEPS)]
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        learning_rate=1e-3,
        use_liger_kernel=liger,
        liger_kernel_config={"fused_linear_cross_entropy": False} if liger else None,
    )
    more: dict[str, Any] = {"long_context": LongContextConfig()} if liger else {}
    trainer = (LongContextTrainer if liger else Trainer)(
        model=model, args=args, train_dataset=rows, **more
    )
    trainer.train()
    kernels = [m for m in model.modules() if "liger" in getattr(m.forward, "__module__", "")]
    assert bool(kernels) == liger
    history = trainer.state.log_history
    return [(line["loss"], line["grad_norm"]) for line in history if "grad_norm" in line]


def test_steps_are_those_of_the_stock_layers(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    stock = logged(tmp_path / "stock", liger=False)
    ours = logged(tmp_path / "ours", liger=True)  # puts its classes into transformers' module
    assert len(ours) == STEPS
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=2e-4, atol=0)
