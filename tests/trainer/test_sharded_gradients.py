"""Between the forwards of a step FSDP2 holds its ranks' parts of the gradients only.

transformers skips the reduction in all but the last forward, after which FSDP2 keeps gradients as
large as the whole model on every rank. `test_exactness.py` compares such steps with one process.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.plugin.launched import run_launched, sharding_on_cpus
from tests.plugin.sharded import has_part_of_gradient
from tests.trainer.trained import Case, make_trainer, sharded

RING = {"ring_degree": 2}
CASE = Case(
    "sharded",
    config=RING,
    arguments={"gradient_accumulation_steps": 3, "max_steps": 2},
    sharding=sharded(RING, "LlamaDecoderLayer", 1),
)
DEFERRED = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}


class Watch(TrainerCallback):
    """Notes after each forward but a step's last one whether parameters hold parts of gradients."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        trained = [p for p in given["model"].parameters() if p.requires_grad]
        self.found.append(all(has_part_of_gradient(parameter) for parameter in trained))


def watched(case: Case, folder: str) -> list[bool]:
    watch = Watch()
    with sharding_on_cpus():
        trainer = make_trainer(case, folder, is_patched=True, callbacks=[watch])
        trainer.train()
    return watch.found


def both(folder: str) -> list[list[bool]]:
    asked = replace(CASE, arguments=CASE.arguments | {"accelerator_config": DEFERRED})
    return [watched(case, folder) for case in (CASE, asked)]


def test_gradients_stay_sharded_unless_asked_otherwise(tmp_path: Path) -> None:
    for found in run_launched(both, 4, str(tmp_path)):
        assert found == [[True] * 4, [False] * 4]
