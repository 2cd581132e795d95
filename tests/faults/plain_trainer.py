"""A script of a user's: transformers' Trainer over sharded sequences, under a watchdog.

It is started as a recipe is, with the same options, and leaves what a recipe leaves:
`out/metrics.jsonl` and `out/final`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from longctx_patch import LongContextConfig, LongContextTrainer, TimeLimits, Watchdog
from longctx_patch.checkpoints.series import checkpoints_of
from tests.faults.plant import SAVE_EVERY, STEPS
from tests.tiny_llama import TINY_LLAMA

ROWS = [{"input_ids": [row + place for place in range(48)]} for row in range(40)]


def batch_of(rows: list[Any]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def main(options: list[str]) -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser()
    for name in ("settings", "resume", "step-timeout", "save-timeout"):
        parser.add_argument(f"--{name}")
    given = {name: value for name, value in vars(parser.parse_args(options)).items() if value}
    settings = yaml.safe_load(Path(given["settings"]).read_text()) | given
    step_s, save_s = (float(settings.get(f"{name}_timeout", 60)) for name in ("step", "save"))
    with Watchdog(TimeLimits(step_s=step_s, save_s=save_s)) as watchdog:
        _train(watchdog, settings["ring"], Path("out"))


def _train(watchdog: Watchdog, ring: int, out: Path) -> None:
    torch.manual_seed(0)
    trainer = LongContextTrainer(
        model=LlamaForCausalLM(LlamaConfig.from_dict(TINY_LLAMA)),
        args=TrainingArguments(
            output_dir=str(out),
            use_cpu=True,
            max_steps=STEPS,
            save_steps=SAVE_EVERY,
            logging_steps=1,
            learning_rate=0.01,
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=ROWS,
        data_collator=batch_of,
        long_context=LongContextConfig(ring_degree=ring),
        watchdog=watchdog,
    )
    goes_on = bool(checkpoints_of(out).found())
    trainer.train(resume_from_checkpoint=goes_on or None)
    trainer.accelerator.unwrap_model(trainer.model_wrapped)
    trainer.save_model(str(out / "final"))
    if trainer.is_world_process_zero():
        lines = [entry for entry in trainer.state.log_history if "loss" in entry]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / "metrics.jsonl").write_text(text)
    trainer.accelerator.wait_for_everyone()
