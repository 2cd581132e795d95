"""One launch of lora.py: a trainer's first step compared with one process, then steps timed.

Started by lora.py with a file that says what to do; appends a line of JSON for each length. The
launch "reference" writes the model, and what one process computes with it.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

if __name__ == "__main__" and ".unsloth" in sys.argv[1]:
    import_module("unsloth")  # before the rest, which it changes

import torch
from measure import Row, dtype_on, finish, own_device, slowest, versions
from model_shapes import model_config, sizes_of
from report import append_line
from step_job import OUT_OF_MEMORY, compared, largest, peak_bytes, what_is_wrong
from systems import Job, gradient_norm
from systems.model import checkpoint_layers, make_model, random_row
from systems.ours import launch_environment
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from trainers_job import common_arguments, tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from longctx_patch import LongContextConfig, LongContextTrainer
from longctx_patch.hf.layers.fused_layers import fuse_layers

RANK, ALPHA = 16, 32
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER_STD = 0.02  # of both matrices: with the usual zeros one of them has no gradient
WARM_UP_STEPS = {"ours": 4, "ours_fsdp2": 4}  # until `auto` has settled; one of the others


class WrongResult(Exception):
    """A system's first step is not that of one process; the message says where."""


def fill_adapter(model: nn.Module) -> nn.Module:
    """Give the adapter numbers that depend on the names of its weights alone. Returns `model`."""
    generator = torch.Generator().manual_seed(0)
    for _, weight in adapter_of(model):
        values = torch.randn(weight.shape, generator=generator) * ADAPTER_STD
        weight.data.copy_(values.to(weight.device))
    return model


def adapter_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return sorted((name, weight) for name, weight in model.named_parameters() if ".lora_" in name)


def gradients_of(model: nn.Module) -> dict[str, float]:
    """The norms of the adapter's gradients in the first and the last layer."""
    names = [name for name, _ in adapter_of(model)]
    layers = [int(name.split(".layers.")[1].split(".")[0]) for name in names]
    ends = {0, max(layers)}
    found = [name for name, layer in zip(names, layers, strict=True) if layer in ends]
    return {name.split(".layers.")[1]: gradient_norm(model, name) for name in found}


def with_adapter(model: PreTrainedModel) -> Any:
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=[*LINEAR])
    return fill_adapter(get_peft_model(model, adapter)).train()


def write_model(settings: Row, job: Job) -> dict[str, float]:
    """Write the model with a tokenizer for all launches; the stock model's loss and gradients."""
    config = model_config(settings["model"], settings["num_layers"], longest(settings))
    model = make_model(config, job.device, dtype_on(job.device))
    model.save_pretrained(settings["weights"])
    tokenizer(job.shape.vocab_size).save_pretrained(settings["weights"])
    wrapped = with_adapter(model)
    row = random_row(settings["check_tokens"], job.shape.vocab_size, job.device)
    with torch.autocast(job.device.type, torch.bfloat16, enabled=job.device.type == "cuda"):
        loss = wrapped(input_ids=row, labels=row, use_cache=False).loss
    loss.backward()
    return {"loss": float(loss.detach())} | gradients_of(wrapped)


def read_model(settings: Row, job: Job) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        settings["weights"],
        dtype=dtype_on(job.device),
        device_map={"": job.device},
        attn_implementation="sdpa",
    )
    model.config.use_cache = False
    return with_adapter(model)


def longest(settings: Row) -> int:
    return int(max(*settings["tokens"], settings["check_tokens"]))


def lengths_of(settings: Row) -> list[int]:
    """Tokens of each step's row: the small one that is compared, then those that are timed."""
    steps = WARM_UP_STEPS.get(settings["system"], 1) + settings["steps"]
    timed = [tokens for tokens in settings["tokens"] for _ in range(steps)]
    return [settings["check_tokens"], *timed]


@dataclass(eq=False)
class Watch(TrainerCallback):
    """Compares the first step with one process, and says a row when a length's last step ended."""

    settings: Row
    job: Job
    say: Callable[[Row], None]
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    peaks: list[tuple[int, int]] = field(default_factory=list)
    check: Row = field(default_factory=dict)
    details: Callable[[], Row] = dict
    """What a system has decided by itself."""

    @property
    def num_tokens(self) -> int:
        """How many tokens the row has whose step is running, or has just ended."""
        return lengths_of(self.settings)[len(self.losses)]

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.gradients = self.gradients or gradients_of(model)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        on_cuda = self.job.device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize()
        self.ends.append(perf_counter())
        self.peaks.append(peak_bytes(self.job.device))
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()

    def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:
        if "loss" not in logs:  # the summary of the whole training
            return
        self.losses.append(logs["loss"])
        plan, done = lengths_of(self.settings), len(self.losses)
        if done == 1:
            self._compare()
        elif done == len(plan) or plan[done] != plan[done - 1]:
            self._say_length(plan[done - 1], self.settings["steps"])

    def _compare(self) -> None:
        expected = self.settings["one_process"]
        found = {"loss": self.losses[0]} | self.gradients
        self.check = compared(self.settings["check_tokens"], found, expected)
        wrong = what_is_wrong(self.check, self.job.device.type)
        if wrong is not None:
            raise WrongResult(wrong)

    def _say_length(self, num_tokens: int, steps: int) -> None:
        seconds = [after - before for before, after in pairwise(self.ends)]
        timing = slowest(seconds[-steps:])
        self.say(
            {
                "num_tokens": num_tokens,
                "status": "ok",
                **timing._asdict(),
                "tokens_per_s_per_gpu": num_tokens / timing.seconds,
                **largest(self.peaks[-steps:]),
                "losses": self.losses[lengths_of(self.settings).index(num_tokens) :],
                "steps_s": seconds[lengths_of(self.settings).index(num_tokens) - 1 :],
                "check": self.check,
                **self.details(),
            }
        )


def arguments_of(settings: Row, job: Job) -> dict[str, Any]:
    return common_arguments({"checkpoint": "none", **settings}, job) | {
        "max_steps": len(lengths_of(settings)),
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.0,  # no clipping: gradients are compared
        "gradient_accumulation_steps": 1,  # Unsloth's default is 2
    }


def with_liger(job: Job) -> dict[str, Any]:
    """Liger Kernel's layers and its loss without logits, which need a GPU."""
    return {"use_liger_kernel": job.device.type == "cuda"}


def rows_of(settings: Row, job: Job) -> list[list[int]]:
    """All ranks' rows, step after step: the same for each, so that their mean is one's gradient."""
    return [
        random_row(tokens, job.shape.vocab_size, torch.device("cpu"))[0].tolist()
        for tokens in lengths_of(settings)
        for _ in range(job.num_ranks)
    ]


def run_trainer(
    settings: Row, job: Job, watch: Watch, *, is_ours: bool = False, recomputes: bool = True
) -> None:
    """transformers' Trainer, or ours in its place with everything chosen by itself."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    model, given = read_model(settings, job), arguments_of(settings, job)
    more: dict[str, Any] = {}
    if is_ours:
        more = {"long_context": LongContextConfig(checkpoint="auto")}
        fuse_layers(model, "liger" if job.device.type == "cuda" else "none")
    else:
        given |= with_liger(job)
        if recomputes:
            checkpoint_layers(model)  # SFTTrainer does so by itself
    trainer: Any = (LongContextTrainer if is_ours else Trainer)(
        model=model,
        args=TrainingArguments(**given),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows_of(settings, job)],
        data_collator=default_data_collator,
        callbacks=[watch],
        **more,
    )
    if is_ours:
        handle = trainer.long_context_handle
        watch.details = lambda: {"checkpointing": asdict(handle.checkpointing)}
    trainer.train()


def run_sharded(settings: Row, job: Job, watch: Watch) -> None:
    """Ours as `longctx patch` sets it up: FSDP2, around one process in place of autocast."""
    if job.device.type == "cuda":
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
        alone = one | meeting if job.num_ranks == 1 else {}
        os.environ.update(alone | launch_environment(job.num_ranks))
    run_trainer(settings, job, watch, is_ours=True)


def run_sft(
    settings: Row, job: Job, watch: Watch, model: Any = None, *, recomputes: bool = True
) -> None:
    """TRL's SFTTrainer; Unsloth gives it a model of its own, with its own checkpointing."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import SFTConfig, SFTTrainer

    given = arguments_of(settings, job) | ({} if model else with_liger(job))
    given |= {"max_length": None, "packing": False, "gradient_checkpointing": recomputes}
    given |= {"dataset_kwargs": {"skip_prepare_dataset": True}}  # rows are tokenised already
    SFTTrainer(
        model=model or read_model(settings, job),
        args=SFTConfig(**given),
        # A name of its own, since hashing the rows fails under Python 3.12 (dill 0.4.1).
        train_dataset=Dataset(
            InMemoryTable.from_pydict({"input_ids": rows_of(settings, job)}), fingerprint="rows"
        ),
        processing_class=tokenizer(job.shape.vocab_size),
        callbacks=[watch],
    ).train()


def run_unsloth(
    settings: Row, job: Job, watch: Watch, recomputes: bool | Literal["unsloth"] = "unsloth"
) -> None:
    """As Unsloth's documentation sets up LoRA over 16 bits; for long rows, if not told else."""
    FastLanguageModel = import_module("unsloth").FastLanguageModel
    model, _ = FastLanguageModel.from_pretrained(
        settings["weights"],
        max_seq_length=longest(settings),
        dtype=dtype_on(job.device),
        load_in_4bit=False,
        local_files_only=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        target_modules=[*LINEAR],
        lora_alpha=ALPHA,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing=recomputes,
    )
    run_sft(settings, job, watch, fill_adapter(model), recomputes=bool(recomputes))


SYSTEMS: dict[str, Callable[[Row, Job, Watch], None]] = {
    "ours": lambda *given: run_trainer(*given, is_ours=True),
    "ours_fsdp2": run_sharded,
    "trainer": run_trainer,
    "trainer_kept": partial(run_trainer, recomputes=False),
    "sft": run_sft,
    "unsloth": run_unsloth,
    "unsloth_kept": partial(run_unsloth, recomputes=False),
    "unsloth_on_gpu": partial(run_unsloth, recomputes=True),
}


def run(settings: Row) -> None:
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    job = Job(own_device(), rank, num_ranks, sizes_of(settings))

    def say(row: Row) -> None:
        if job.rank == 0:
            who = {"system": settings["system"], "versions": versions()}
            append_line(who | row, Path(settings["lines"]))

    if settings["one_process"] is None:
        say({"status": settings["system"], "one_process": write_model(settings, job)})
        return
    watch = Watch(settings, job, say)
    try:
        SYSTEMS[settings["system"]](settings, job, watch)
    except WrongResult as wrong:
        say({"status": "wrong", "reason": str(wrong), "check": watch.check})
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0][:200]
        say({"num_tokens": watch.num_tokens, "status": OUT_OF_MEMORY, "reason": reason})
    finish()


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
