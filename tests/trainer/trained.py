"""Trainers over tiny models in launched processes, with all that they log and their weights."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainingArguments

from longctx_patch import LongContextConfig, LongContextTrainer, trainer_parallelism
from longctx_patch.recipes.models import four_bits
from tests.hf.seeing import pictured_rows, seeing_model, seen_together
from tests.hf.tiny import VOCABULARY, featured_model
from tests.plugin.launched import sharding_on_cpus
from tests.reference import relative_error

STEPS = 4
TIMES = ("_runtime", "_per_second", "_time")
"""Ends of the names of what is logged and measures time."""
COUNTED = ("_samples_per_second", "_steps_per_second")
"""Ends of the names of speeds that say how much was counted."""


@dataclass(frozen=True)
class Case:
    """A training run, over several ranks and over one process per sequence group."""

    name: str
    family: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    """More arguments where the model is patched: those of FSDP2."""
    num_rows: int = 50
    adapters: dict[str, Any] | None = None
    """Arguments of PEFT's LoraConfig."""
    four_bits: bool = False
    """Whether the adapters' model is quantised (QLoRA)."""
    predicts: bool = False
    """Whether metrics are computed from logits."""
    own_loss: bool = False
    """Whether a function computes the loss from logits."""
    has_images: bool = False
    """Whether the model reads images, which most rows have."""
    every_row_has_images: bool = False


class Trained(NamedTuple):
    logged: list[dict[str, float]]
    weights: dict[str, Tensor]
    evaluated: dict[str, float]
    predicted: Any = None


def rows(number: int, seed: int) -> list[dict[str, list[int]]]:
    """Rows of 9 to 29 tokens. Some have labels at their end only, and every fifth has none."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        length = int(torch.randint(9, 30, (1,), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        first = (1, 3, length // 2, length - 2, length)[index % 5]
        found.append({"input_ids": ids, "labels": [-100] * first + ids[first:]})
    return found


def rows_of(case: Case, number: int, seed: int) -> list[dict[str, Any]]:
    if case.has_images:
        return pictured_rows(case.family, number, seed, every=case.every_row_has_images)
    return rows(number, seed)


def padded(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)

    def stacked(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in batch])

    lengths = torch.tensor([len(row["input_ids"]) for row in batch])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {
        "input_ids": stacked("input_ids", 0),
        "labels": stacked("labels", -100),
        "attention_mask": mask,
    }


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.02,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "optim": "sgd",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "non_padding",
    }
    return TrainingArguments(**usual | options)


def sharded(
    config: dict[str, Any], layer: str, copies: int = 1, num_processes: int = 4
) -> dict[str, Any]:
    """Arguments of FSDP2 for several processes, two of which share a row."""
    sizes = {"dp_replicate_size": copies, "dp_shard_size": num_processes // 2 // copies}
    return {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": [layer]},
        "parallelism_config": trainer_parallelism(
            LongContextConfig(**config), num_processes, **sizes
        ),
    }


def make_trainer(
    case: Case, folder: Path | str, *, is_patched: bool, model: Any = None, **options: Any
) -> Trainer:
    """The trainer of a case: ours, or the stock one with the stock model."""
    given = case.arguments | (case.sharding if is_patched else {})
    if case.has_images:
        given = given | {"remove_unused_columns": False}  # rows aren't the model's arguments yet
    common: dict[str, Any] = {
        "model": model_of(case) if model is None else model,
        "args": arguments(folder, **given),
        "train_dataset": rows_of(case, case.num_rows, seed=1),
        "eval_dataset": rows_of(case, 7, seed=2),
        "data_collator": partial(seen_together, case.family) if case.has_images else padded,
        "compute_metrics": metrics_of if case.predicts else None,
        "compute_loss_func": squared_loss if case.own_loss else None,
        **options,
    }
    trainer = (
        LongContextTrainer(**common, long_context=LongContextConfig(**case.config))
        if is_patched
        else Trainer(**common)
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def model_of(case: Case) -> Any:
    made = seeing_model if case.has_images else featured_model
    model: Any = made(case.family, **case.model)
    if case.four_bits:
        # PEFT's own choice, reentrant checkpointing, fails under DDP with the stock model too.
        checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
        model = prepare_model_for_kbit_training(quantised(model), **checkpointing)
    if case.adapters is None:
        return model
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(**case.adapters))
    with torch.no_grad():  # a fresh adapter's B is 0, and then A has no gradient
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return adapted


def quantised(model: Any) -> Any:
    """The model with weights of four bits, which are made where it is loaded."""
    return (
        type(model)
        .from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            attn_implementation=model.config._attn_implementation,
            dtype=torch.float32,
            quantization_config=four_bits(torch.float32),
            device_map={"": "cpu"},
        )
        .train()
    )


def squared_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Cross-entropy and a little of the squared logits, over all tokens that have a label."""
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    logits = logits[wanted != -100]
    losses = cross_entropy(logits, wanted[wanted != -100], reduction="sum")
    return (losses + 0.01 * (logits**2).sum()) / num_items_in_batch


def metrics_of(predicted: EvalPrediction) -> dict[str, float]:
    """Metrics of logits, labels, losses and inputs, which differ if a row is missing or double."""
    logits, labels = predicted.predictions, predicted.label_ids
    return {
        "accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean()),
        "squared": float((logits[labels != -100] ** 2).mean()),
        "rows": float(len(labels)),
        "inputs": float(predicted.inputs.sum()),
        "losses": float(predicted.losses.sum()),
    }


def train(case: Case, folder: str, is_patched: bool) -> Trained:
    with sharding_on_cpus() if case.sharding and is_patched else nullcontext():
        trainer = make_trainer(case, Path(folder) / case.name, is_patched=is_patched)
        trainer.train()
        evaluated = numbers(trainer.evaluate())
        predicted = trainer.predict(rows_of(case, 5, seed=3)) if case.predicts else None
    assert isinstance(trainer.model_wrapped, FSDPModule) == bool(case.sharding and is_patched)
    return found_of(trainer, evaluated, predicted)


def found_of(trainer: Any, evaluated: dict[str, float], predicted: Any = None) -> Trained:
    """What a trainer that is done has logged and learned."""
    logged = [numbers(entry) for entry in trainer.state.log_history]
    return Trained(logged, weights_of(trainer.model), evaluated, predicted)


def weights_after(
    case: Case,
    folder: Path | str,
    resume: Any = None,
    *,
    is_patched: bool = True,
    from_zero: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Train to the end, in a resumed run from weights that are 0 at first."""
    model = model_of(case)
    if resume or from_zero:
        empty(model)
    trainer = make_trainer(case, folder, is_patched=is_patched, model=model, **options)
    trainer.train(resume_from_checkpoint=resume)
    return weights_of(trainer.model)


def empty(model: Any) -> None:
    """Make all trained weights 0, of which nothing comes in a resumed run."""
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.zero_()


def weights_of(model: Any) -> dict[str, Tensor]:
    """Whole weights, also of a model whose weights are sharded."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def numbers(entry: dict[str, Any]) -> dict[str, float]:
    """What an entry of the log says: of speeds how many rows and steps they count, and no times."""
    found = {name: float(value) for name, value in entry.items() if not name.endswith(TIMES)}
    for name, speed in entry.items():
        if name.endswith(COUNTED):
            prefix, counted = name.removesuffix("_per_second").rsplit("_", 1)
            found[f"{prefix}_{counted}"] = round(speed * entry[f"{prefix}_runtime"])
    return found


def train_all(cases: list[Case], folder: str, is_patched: bool) -> list[Trained]:
    return [train(case, folder, is_patched) for case in cases]


def complaints(found: Trained, wanted: Trained, tolerance: float = 1e-5) -> list[str]:
    """Where a run differs from the wanted one, in words."""
    wrong = []
    ours, others = entries(found), entries(wanted)
    if [sorted(entry) for entry in ours] != [sorted(entry) for entry in others]:
        return [f"logged {[sorted(e) for e in ours]}, not {[sorted(e) for e in others]}"]
    for number, (mine, theirs) in enumerate(zip(ours, others, strict=True)):
        for name, value in theirs.items():
            both_nan = math.isnan(mine[name]) and math.isnan(value)
            if not (both_nan or abs(mine[name] - value) <= tolerance * max(1.0, abs(value))):
                wrong.append(f"entry {number}: {name} is {mine[name]!r}, not {value!r}")
    for name, weight in wanted.weights.items():
        error = float((found.weights[name] - weight).abs().max())
        if not error < tolerance:
            wrong.append(f"{name} differs by {error:.1e}")
    if wanted.predicted is not None:
        learned = wanted.predicted.label_ids != -100  # on padding our logits are 0
        for mine, theirs in zip(found.predicted[:2], wanted.predicted[:2], strict=True):
            same = mine.shape == theirs.shape
            if not same or not abs(mine - theirs)[learned].max() < tolerance:
                wrong.append("predictions or labels differ")
    return wrong[:6]


def difference(found: Trained, wanted: Trained) -> float:
    """The largest one, relative to values above 1 and to each weight's largest value."""
    ours, others = entries(found), entries(wanted)
    gaps = [
        abs(mine[name] - value) / max(1.0, abs(value))
        for mine, theirs in zip(ours, others, strict=True)
        for name, value in theirs.items()
    ]
    weights = (relative_error(found.weights[name], x) for name, x in wanted.weights.items())
    return max(*gaps, *weights)


def entries(run: Trained) -> list[dict[str, float]]:
    """All that a run says in numbers."""
    predicted = [] if run.predicted is None else [numbers(run.predicted.metrics)]
    return [*run.logged, run.evaluated, *predicted]
