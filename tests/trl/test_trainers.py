"""TRL's trainers over several ranks per sequence log and learn what the same trainer does with the
stock model on one process for each sequence group: all metrics of 4 steps, and every weight."""

from pathlib import Path
from typing import Any

import pytest

from tests.plugin.launched import run_launched
from tests.trainer.trained import Trained, complaints, sharded
from tests.trl.cases import Case, train_all, write_rows

RING: dict[str, Any] = {"ring_degree": 2}
ULYSSES = {"ulysses_degree": 2}
BOTH = RING | ULYSSES
ALIKE = {"share_prefixes": "always"}
"""Where rows of a batch begin alike, they are computed as one row with branches."""
THRICE = {"gradient_accumulation_steps": 3}
ALL_OF_DPO = [
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot"),
    *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
]
ALL_LOSSES = {
    "loss_type": ALL_OF_DPO,
    "loss_weights": [1 / len(ALL_OF_DPO)] * len(ALL_OF_DPO),
    "label_smoothing": 0.1,
}
BEFOREHAND = {"precompute_ref_log_probs": True}
WEIGHED = BEFOREHAND | {"use_weighting": True, "ld_alpha": 0.5}
ONE_PAIR = {"per_device_train_batch_size": 1}
"""Then gradients of a head that learns are made in forward."""
PACKED, PADDING_FREE = (
    {"packing": True, "max_length": 40},
    {"padding_free": True, "max_length": None},
)
GENERATED = {"max_completion_length": 8, "num_generations": 4, "beta": 0.1, "max_steps": 4}
TWO_EACH = GENERATED | {"num_generations": 2, "beta": 0.02}
TWICE = GENERATED | {"num_iterations": 2, "top_entropy_quantile": 0.5}
FOUR_ROWS = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
GROUPED = GENERATED | THRICE | FOUR_ROWS
ANSWERS = {"assistant_only_loss": True}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
SHARDED = {copies: sharded(RING, "LlamaDecoderLayer", copies=copies) for copies in (1, 2)}
QWEN3_SHARDED = sharded(RING, "Qwen3DecoderLayer", copies=1)

TWO = [
    Case("sft", "sft", "text", RING, arguments=THRICE, layers=2),
    Case("dft", "sft", "text", RING, "mixtral", arguments={"loss_type": "dft"}),
    Case("padding-free", "sft", "text", ULYSSES, "mistral", arguments=PADDING_FREE),
    Case("dpo", "dpo", "pairs", RING, arguments=THRICE),
    Case("dpo beforehand", "dpo", "pairs", RING, arguments=WEIGHED),
    Case("dpo of one pair", "dpo", "pairs", RING, arguments=ALL_LOSSES | ONE_PAIR),
    Case("kto", "kto", "labelled", ULYSSES, "qwen3"),
    Case("rloo", "rloo", "prompts", ULYSSES | ALIKE, "mistral", adapter=True, arguments=TWO_EACH),
    Case(
        "grpo by prompt",
        "grpo",
        "prompts",
        RING | ALIKE,
        adapter=True,
        arguments=GROUPED,
        mixin={"group_by_prompt": True},
        not_compared=("entropy", "kl"),  # means of micro-batches, whose rows differ
    ),
]
FOUR = [
    Case("kto with adapters", "kto", "labelled", BOTH, adapter=True, arguments=BEFOREHAND),
]
REPLICAS = [
    Case("packed", "sft", "text", RING, arguments=PACKED | THRICE, layers=2),
    Case("dpo with adapters", "dpo", "pairs", ULYSSES | ALIKE, adapter=True, arguments=ALL_LOSSES),
    Case("grpo", "grpo", "prompts", RING, "qwen3", adapter=True, arguments=TWICE),
    Case("routed", "sft", "completion", ULYSSES, "mixtral", arguments=THRICE, model=ROUTED),
    Case("chat", "sft", "chat", RING, "qwen3", arguments=ANSWERS, sharding=QWEN3_SHARDED),
    Case(
        "dpo of HSDP",
        "dpo",
        "pairs",
        RING | ALIKE,
        arguments=THRICE | ONE_PAIR,
        sharding=SHARDED[2],
    ),
    Case("grpo of shards", "grpo", "prompts", RING, arguments=GENERATED, sharding=SHARDED[1]),
]
"""A prompt's generations are of both replicas in the last case."""


def run(runs: list[tuple[Case, bool]], folder: Path, num_processes: int) -> list[Trained]:
    """What the last process has of each case; with True the model is patched."""
    folder = folder / str(num_processes)  # a cache of its own: reference values are cached
    write_rows([case for case, _ in runs], folder)
    found: list[Trained] = run_launched(train_all, num_processes, runs, folder)[-1]
    return found


def check(cases: list[Case], found: list[Trained], wanted: list[Trained]) -> None:
    for case, mine, stock in zip(cases, found, wanted, strict=True):
        wrong = complaints(mine, stock)
        assert not wrong, "\n".join([case.name, *wrong])


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    one = run([(case, False) for case in TWO], tmp_path, 1)
    check(TWO, run([(case, True) for case in TWO], tmp_path, 2), one)


@pytest.mark.timeout(900)  # three runs, each with a limit of its own
def test_four_ranks_train_as_one_process_per_group(tmp_path: Path) -> None:
    one = run([(case, False) for case in FOUR], tmp_path, 1)
    two = run([(case, False) for case in REPLICAS], tmp_path, 2)
    cases = [*FOUR, *REPLICAS]
    check(cases, run([(case, True) for case in cases], tmp_path, 4), [*one, *two])
