"""A preference run that two ranks shared goes on in one process, to the same numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback
from trl import DPOConfig, DPOTrainer

from longctx_patch import LongContextConfig, LongContextTrainerMixin
from tests.hf.tiny import featured_model
from tests.plugin.launched import run_launched
from tests.trainer.trained import numbers
from tests.trl.cases import rows, tokenizer


class LongDPOTrainer(LongContextTrainerMixin, DPOTrainer):
    pass


def trained(folder: str, ring: int, resumed: str = "") -> list[dict[str, float]]:
    """What four steps log, in a run that goes on from a checkpoint if there is one."""
    args = DPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=4,
        learning_rate=0.02,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    trainer = LongDPOTrainer(
        featured_model("llama"),
        args=args,
        train_dataset=Dataset.from_list(rows("pairs", 8, 1)),
        processing_class=tokenizer(),
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]),
        long_context=LongContextConfig(ring_degree=ring),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resumed or None)
    entries = [numbers(entry) for entry in trainer.state.log_history if "loss" in entry]
    # TRL counts tokens from the resumption.
    return [{n: v for n, v in entry.items() if n != "num_tokens"} for entry in entries]


@pytest.mark.timeout(300)
def test_pairs_go_on_at_another_degree(tmp_path: Path) -> None:
    """Adapter, AdamW's states, schedule and the order of rows; the reference is the model with its
    adapter off, which the checkpoint does not change."""
    whole, _ = run_launched(trained, 2, str(tmp_path / "two"), 2)
    checkpoint = tmp_path / "two" / "checkpoint-2"
    (alone,) = run_launched(trained, 1, str(tmp_path / "one"), 1, str(checkpoint))
    assert alone[:2] == whole[:2]
    margins = [entry["rewards/margins"] for entry in whole]
    assert abs(margins[3]) > 1e-4, "it has learned"
    for found, wanted in zip(alone[2:], whole[2:], strict=True):
        values: Any = pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert found == values
    assert len(alone) == 4
