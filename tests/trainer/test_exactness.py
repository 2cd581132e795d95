"""A trainer over several ranks per sequence logs and learns what one process with the stock model
does: every metric of 6 steps, over the ends of epochs, and of an evaluation, and every weight."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import TrainerCallback

from longctx_patch.plugin import accelerate_yaml
from tests.plugin.launched import run_launched, sharding_on_cpus
from tests.plugin.sharded import has_part_of_gradient
from tests.plugin.test_yaml import launch_arguments
from tests.trainer.trained import (
    Case,
    Trained,
    complaints,
    make_trainer,
    sharded,
    train,
    train_all,
)

ACCUMULATED = {"gradient_accumulation_steps": 3}
ODD = 14
"""Rows of an epoch that has no whole number of accumulated steps."""
LOGITS = {"ring_degree": 2, "loss": "logits"}
TWO = [
    Case("llama", config={"ring_degree": 2}, arguments=ACCUMULATED, num_rows=ODD),
    Case(
        "qwen3",
        "qwen3",
        config={"ulysses_degree": 2, "layout": "contiguous"},  # ranks without a label
        arguments={"optim": "adamw_torch", "learning_rate": 1e-3},
        num_rows=ODD,
    ),
    Case(
        "mixtral",
        "mixtral",
        config={"ring_degree": 2, "checkpoint": "attention"},
        model={"output_router_logits": True},
    ),
    Case(
        "adapters and more",
        config={"ring_degree": 2},
        arguments={"gradient_checkpointing": True},
        adapters={
            "target_modules": ["q_proj", "down_proj"],
            "modules_to_save": ["lm_head"],
            "trainable_token_indices": [3, 7],
        },
    ),
    Case(
        "adapters over four bits",
        config={"ring_degree": 2, "checkpoint": "attention", "mlp_tiles": 3},
        model={"intermediate_size": 128},  # a multiple of what bitsandbytes scales together
        adapters={"target_modules": "all-linear"},
        four_bits=True,
    ),
    Case(
        "kept on the host over four bits",
        config={"ulysses_degree": 2, "checkpoint": "offload", "attention_kept": 0.5},
        arguments={"max_steps": 2},
        model={"intermediate_size": 128},
        adapters={"target_modules": "all-linear"},
        four_bits=True,
    ),
    Case(
        "hybrid",
        "qwen3_5_text",
        config={
            "ring_degree": 2,
            "layout": "contiguous",
            "plan": "distflash_balanced",
            "checkpoint": "full",
        },
        arguments={"max_steps": 4},
    ),
    Case("smoothed", config=LOGITS, arguments={"label_smoothing_factor": 0.1}),
    Case("own loss", config=LOGITS, arguments=ACCUMULATED, own_loss=True),
]
FOUR = [
    Case(
        "mistral",
        "mistral",
        config={"ulysses_degree": 2, "ring_degree": 2},
        model={"tie_word_embeddings": True},
    ),
]
REPLICAS = [
    Case(
        "replicas of mistral",
        "mistral",
        config={"ring_degree": 2},
        arguments=ACCUMULATED,
        num_rows=12,  # as many as one process with twice the batch takes in an epoch
    ),
    Case(
        "replicas of qwen3",
        "qwen3",
        config={"ulysses_degree": 2, "loss": "logits"},
        arguments={"include_for_metrics": ["inputs", "loss"]},
        num_rows=ODD,
        predicts=True,
    ),
    Case(
        "replicas of mixtral",
        "mixtral",
        config={"ring_degree": 2},
        arguments=ACCUMULATED,
        model={"output_router_logits": True, "router_aux_loss_coef": 0.1},
    ),
]


RING: dict[str, Any] = {"ring_degree": 2}
SHARDED = [
    Case(
        f"{copies} copies of shards",
        "qwen3",
        config=RING,
        arguments=ACCUMULATED,
        sharding=sharded(RING, "Qwen3DecoderLayer", copies),
    )
    for copies in (1, 2)
]
"""FSDP2 over replicas and the ranks of a row, and over these with copies beside them (HSDP)."""


class Watch(TrainerCallback):
    """Notes after each forward but a step's last one whether each parameter holds its rank's part
    of the gradient, and only this."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        trained = [p for p in given["model"].parameters() if p.requires_grad]
        self.found.append(all(has_part_of_gradient(parameter) for parameter in trained))


class OfFour(NamedTuple):
    """What a rank of four has."""

    trained: list[Trained]
    launched: Trained
    """Of the first replicas, with the variables that a launch file sets in place of arguments."""
    sharded: list[list[bool]]
    """What is found of gradients between the forwards of a step, as it is and as it was asked."""


def train_on_four(cases: list[Case], folder: str, exported: dict[str, str]) -> OfFour:
    trained = train_all(cases, folder, True)
    with patch.dict(os.environ, exported):
        launched = train(REPLICAS[0], folder, True)
    found = []
    for asked in ({}, {"accelerator_config": DEFERRED}):
        case = replace(SHARDED[0], arguments=ACCUMULATED | {"max_steps": 2} | asked)
        watch = Watch()
        with sharding_on_cpus():
            make_trainer(case, folder, is_patched=True, callbacks=[watch]).train()
        found.append(watch.found)
    return OfFour(trained, launched, found)


DEFERRED = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}


def exported_by_launcher(folder: Path) -> dict[str, str]:
    """The variables of a launch file for two replicas of two ranks."""
    file = folder / "launch.yaml"
    file.write_text(accelerate_yaml(4, 2, fsdp=False, cpu=True, mixed_precision="no"))
    exported = prepare_multi_gpu_env(launch_arguments(file, "--main_process_port", "0"))
    assert exported["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    kinds = ("ACCELERATE_", "PARALLELISM_CONFIG_")
    return {name: value for name, value in exported.items() if name.startswith(kinds)}


def check(cases: list[Case], by_rank: list[list[Trained]], wanted: list[Trained]) -> None:
    for number, (case, one) in enumerate(zip(cases, wanted, strict=True)):
        for found in by_rank:
            wrong = complaints(found[number], one)
            assert not wrong, "\n".join([case.name, *wrong])


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    (one,) = run_launched(train_all, 1, TWO, str(tmp_path / "one"), False)
    check(TWO, run_launched(train_all, 2, TWO, str(tmp_path / "two"), True), one)


def test_four_ranks_train_as_one_and_as_two(tmp_path: Path) -> None:
    """Two groups of two are two replicas: the same trainer on two processes, whose weights are
    those of one process with twice the batch."""
    alone = [*FOUR, doubled(REPLICAS[0])]
    (one,) = run_launched(train_all, 1, alone, str(tmp_path), False)
    together = [*REPLICAS, *SHARDED]
    two, _ = run_launched(train_all, 2, together, str(tmp_path), False)
    exported = exported_by_launcher(tmp_path)
    ranks = run_launched(train_on_four, 4, [*FOUR, *together], str(tmp_path), exported)
    check([*FOUR, *together], [rank.trained for rank in ranks], [one[0], *two])
    weights = [found._replace(logged=[], evaluated={}) for found in (ranks[0].trained[1], one[1])]
    assert not complaints(*weights)
    check([REPLICAS[0]], [[rank.launched] for rank in ranks], two[:1])
    for rank in ranks:
        assert rank.sharded == [[True] * 4, [False] * 4]


def doubled(case: Case) -> Case:
    """The case of one process that has the rows of two."""
    return replace(case, arguments=case.arguments | {"per_device_train_batch_size": 4})
