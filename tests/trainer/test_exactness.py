"""A trainer over several ranks per sequence logs and learns what one process with the stock model
does: every metric of 4 steps, over the ends of epochs, and of an evaluation, and every weight."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import TrainerCallback

from longctx_patch.plugin import accelerate_yaml
from tests.plugin.launched import has_part_of_gradient, run_launched, sharding_on_cpus
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
RING: dict[str, Any] = {"ring_degree": 2}
ULYSSES = {"ulysses_degree": 2}
LOGITS = RING | {"loss": "logits"}
UNLABELLED = ULYSSES | {"layout": "contiguous"}
"""Some ranks have no label."""
KEPT = RING | {"checkpoint": "attention"}
BALANCED = {"layout": "contiguous", "plan": "distflash_balanced", "checkpoint": "full"}
HALF_KEPT = ULYSSES | {"checkpoint": "offload", "attention_kept": 0.5}
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3}
SEEN = {"include_for_metrics": ["inputs", "loss"]}
ROUTED = {"output_router_logits": True}
AND_MORE: dict[str, Any] = {
    "target_modules": ["q_proj", "down_proj"],
    "modules_to_save": ["lm_head"],
}
AND_MORE |= {"trainable_token_indices": [3, 7]}
FOUR_BITS: dict[str, Any] = {"adapters": {"target_modules": "all-linear"}, "four_bits": True}
FOUR_BITS["model"] = {"intermediate_size": 128}  # a multiple of what bitsandbytes scales together
CHECKPOINTED = {"gradient_checkpointing": True}
TWO = [
    Case("llama", config=RING, arguments=ACCUMULATED, num_rows=ODD),
    Case("qwen3", "qwen3", config=UNLABELLED, arguments=ADAM, num_rows=ODD),
    Case("mixtral", "mixtral", config=KEPT, model=ROUTED),
    Case("adapters and more", config=RING, arguments=CHECKPOINTED, adapters=AND_MORE),
    Case("four bits", config=KEPT | {"mlp_tiles": 3}, **FOUR_BITS),
    Case("four bits, kept in half", config=HALF_KEPT, arguments={"max_steps": 2}, **FOUR_BITS),
    Case("hybrid", "qwen3_5_text", config=RING | BALANCED, arguments={"max_steps": 4}),
    Case("smoothed", config=LOGITS, arguments={"label_smoothing_factor": 0.1}),
    Case("own loss", config=LOGITS, arguments=ACCUMULATED, own_loss=True),
]
FOUR = [Case("mistral", "mistral", config=RING | ULYSSES, model={"tie_word_embeddings": True})]
SHARES = ULYSSES | {"loss": "logits"}
REPLICAS = [
    # It has as many rows as one process with twice the batch takes in an epoch.
    Case("replicas of mistral", "mistral", config=RING, arguments=ACCUMULATED, num_rows=12),
    Case("of qwen3", "qwen3", config=SHARES, arguments=SEEN, num_rows=10, predicts=True),
    Case(
        "replicas of mixtral",
        "mixtral",
        config=RING,
        arguments=ACCUMULATED,
        model=ROUTED | {"router_aux_loss_coef": 0.1},
    ),
]
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
DEFERRED = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}


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
    """Returns those of the first replicas, with a launch file's variables in place of arguments."""
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
