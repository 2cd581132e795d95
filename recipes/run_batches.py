"""Makes what each process of the text recipe trains on in each step: rows, order, its shards."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from longctx_patch import SequenceShardCollator
from longctx_patch.engine.groups import world_place
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.recipes.lengths import LengthStage
from longctx_patch.recipes.row_order import RowOrder, check_batch, evenly
from longctx_patch.recipes.settings import Settings
from longctx_patch.recipes.text_rows import TextRows
from longctx_patch.recipes.text_sources import evaluation_rows, rows_of_run


class Stage(NamedTuple):
    """Holds what this process trains on in the steps whose rows are equally long."""

    of: LengthStage
    rows: TextRows
    order: RowOrder
    """The order of all rows, the same in every process."""
    collator: SequenceShardCollator
    """Cuts this process's shard."""

    def __str__(self) -> str:
        forwards, tokens = self.order.accumulation, self.order.rows_per_step * self.of.seq_len
        return f"{self.of}, {tokens:,} tokens a step (gradient_accumulation_steps={forwards})"


class Data(NamedTuple):
    """Holds what this process trains on."""

    stages: tuple[Stage, ...]
    """One after the other; most runs have one."""
    replica: int
    evaluation: TextRows | None = None
    """What is evaluated on."""
    max_eval_samples: int = 0
    """How many of its rows at most; 0: all."""

    def at(self, step: int) -> Stage:
        """The stage of `step` (from 0)."""
        return next((s for s in self.stages if step < s.of.last), self.stages[-1])

    def longest(self, step: int = 0) -> Stage:
        """The stage with the longest rows of those that are not over before `step`."""
        left = [stage for stage in self.stages if step < stage.of.last]
        return max(left or self.stages, key=lambda stage: stage.of.seq_len)

    @property
    def steps_of_epoch(self) -> float:
        """Counts how many steps take each row once."""
        (stage,) = self.stages
        return len(stage.rows) / stage.order.rows_per_step

    @property
    def named_rows(self) -> list[tuple[str, TextRows]]:
        """The rows of each stage, by what to call them."""
        if len(self.stages) == 1:
            return [("train data", self.stages[0].rows)]
        return [(f"train data, {stage.of}", stage.rows) for stage in self.stages]

    @property
    def summary(self) -> str:
        """Returns how rows were packed and drawn, in each stage."""
        told = [stage.rows.summary for stage in self.stages]
        named = [[str(stage), said] for stage, said in zip(self.stages, told, strict=True)]
        return "\n".join(filter(None, told if len(told) == 1 else chain(*named)))

    def called(self, step: int) -> list[str]:
        """The rows of this process in `step` (from 0), in words, one text per forward."""
        stage = self.at(step)
        batches = stage.order.indices(step - stage.of.first, self.replica)
        return [", ".join(map(stage.rows.called, batch)) for batch in batches]

    def identity(self) -> dict[str, Any]:
        """Equal for runs whose steps have equal rows."""
        each = [
            {
                "rows": stage.rows.digest(),
                "num_rows": len(stage.rows),
                "rows_per_step": stage.order.rows_per_step,
            }
            for stage in self.stages
        ]
        if len(each) == 1:
            return each[0]
        return {name: [one[name] for one in each] for name in each[0]}

    def document(self) -> torch.Tensor:
        """The tokens of the longest document in the first replica's first row."""
        stage = self.stages[0]
        row = stage.rows[stage.order.indices(0, 0)[0][0]]
        ids = torch.tensor(row["input_ids"])
        return max(ids.split(row.get("seq_lengths", [len(ids)])), key=len)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns what a line of metrics.jsonl says about the rows of `step` (from 0)."""
        stage = self.at(step)
        packed = {"packing_efficiency": stage.rows.efficiency}
        return {"seq_len": stage.of.seq_len, **({} if stage.rows.edges is None else packed)}


def build_data(settings: Settings, tokenizer: Any) -> Data:
    """Find the rows of the text, which one process of each machine makes, and their order."""
    stages = tuple(
        _build_stage(of_stage, tokenizer, stage)
        for of_stage, stage in zip(settings.of_stages(), settings.length_stages, strict=True)
    )
    replica = world_place(settings.sequence_parallelism()).data_parallel_rank
    rows = evaluation_rows(settings, tokenizer)
    return Data(stages, replica, rows, settings.max_eval_samples)


def _build_stage(settings: Settings, tokenizer: Any, of: LengthStage) -> Stage:
    config = settings.sequence_parallelism()
    _, group_rank, replicas = world_place(config)
    rows = rows_of_run(settings, tokenizer)
    check_batch("batch_size", settings.batch_size, len(rows))
    order = RowOrder(
        rows=rows,
        replicas=replicas,
        batch_size=settings.batch_size,
        accumulation=settings.gradient_accumulation_steps,
        seed=settings.seed,
    )
    collator = SequenceShardCollator(
        config,
        group_rank=group_rank,
        pad_token_id=(
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ),
        packed=settings.pack,
        # The rows of a forward become one row, always of the same length, so that memory is reused.
        pad_to_length=settings.seq_len * settings.batch_size if settings.pack else 0,
    )
    return Stage(of, rows, order, collator)


def micro_batches(data: Data, steps: range) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this process's shard for each forward of these steps."""
    for step in steps:
        stage = data.at(step)
        for rows in stage.order.micro_batches(step - stage.of.first, data.replica):
            yield stage.collator(rows)


def evaluation_batches(data: Data) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this process's shard for each forward over the evaluation rows, `max_eval_samples` at
    most, each of which one replica has. All replicas have as many forwards: one without a row left
    has no labels."""
    rows, stage = data.evaluation, data.longest()
    size = stage.order.batch_size
    assert rows is not None
    unlabelled = rows[0] | {"labels": [IGNORE_INDEX] * len(rows[0]["input_ids"])}
    chosen = evenly(len(rows), data.max_eval_samples)
    for first in range(0, len(chosen), size * stage.order.replicas):
        start = first + size * data.replica
        mine = [rows[index] for index in chosen[start : start + size]]
        yield stage.collator(mine or [unlabelled])
