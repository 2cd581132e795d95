"""Compares what makes a run over TRL one run: our settings, the trainer's own, and its rows."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from longctx_patch.checkpoints.fingerprint import revision_of
from longctx_patch.recipes.data.sources import parts_of
from longctx_patch.recipes.data.token_table import lengths_of
from longctx_patch.recipes.identity import fingerprint
from longctx_patch.recipes.trl_settings import TrlSettings
from longctx_patch.rules.together import own_rank

SHARED = (
    *("max_steps", "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("lr_scheduler_kwargs", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "optim", "optim_args", "seed", "data_seed", "label_smoothing_factor"),
    *("neftune_noise_alpha", "average_tokens_across_devices", "train_sampling_strategy"),
    *("bf16", "fp16", "dataloader_drop_last", "ignore_data_skip"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("eval_strategy", "eval_steps"),  # which checkpoints may be the best
)
"""Arguments of every trainer that change numbers or the final model, where its version has them."""
UNCOUNTED = {
    *("dataset_num_proc", "model_init_kwargs", "max_length", "eval_packing"),
    *("precompute_ref_batch_size", "activation_offloading"),
}
"""Fields of TRL's own configs that change no number of a run, or that stand in other fields."""
NUM_SAMPLES = 64


def trl_fingerprint(
    settings: TrlSettings, args: Any, *, config: Any, tokenizer: Any, rows: Any
) -> dict[str, Any]:
    """The fingerprint of a run. `rows`: the table or stream that it trains on."""
    run = fingerprint(
        settings,
        config=config,
        tokenizer=tokenizer,
        data={**_arguments(args), **_rows(rows), "rows_per_step": _rows_per_step(settings, args)},
        sources=settings.data,
        processes=args.world_size,
        unused=("python",),
    )
    if settings.streaming and own_rank() == 0:
        names = {part.path for part in parts_of(settings.data[0]) if part.reader == "hub"}
        run["files"] |= {name: revision_of(name) for name in sorted(names)}
    return run


def _arguments(args: Any) -> Mapping[str, Any]:
    usual = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(args)} - usual - UNCOUNTED
    values = args.to_dict()
    return {name: values[name] for name in sorted({*SHARED, *own}) if name in values}


def _rows_per_step(settings: TrlSettings, args: Any) -> int:
    groups = args.world_size // settings.sequence_parallelism().sequence_degree
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * groups)


def _rows(rows: Any) -> Mapping[str, Any]:
    """Knows a table by its size, all rows' lengths and some rows, and a stream by its files."""
    if not hasattr(rows, "__len__"):
        return {}
    content = hashlib.sha256(lengths_of(rows).tobytes())
    last = len(rows) - 1
    for number in range(NUM_SAMPLES):
        row = rows[last * number // (NUM_SAMPLES - 1)]
        content.update(repr(sorted(row.items())).encode())
    return {"rows": content.hexdigest()[:16], "num_rows": len(rows)}
