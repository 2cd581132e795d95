"""What each process of the text recipe trains on in each step: rows, their order, its shards."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from longctx_patch import SequenceShardCollator
from longctx_patch.engine.groups import world_place
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.recipes.row_order import RowOrder, check_batch
from longctx_patch.recipes.settings import Settings
from longctx_patch.recipes.text_rows import TextRows
from longctx_patch.recipes.text_sources import evaluation_rows, rows_of_run


class Data(NamedTuple):
    """What this process trains on."""

    rows: TextRows
    order: RowOrder
    """The order of all rows, the same in every process."""
    collator: SequenceShardCollator
    """Cuts this process's shard."""
    replica: int
    evaluation: TextRows | None = None
    """What is evaluated on."""

    @property
    def steps_of_epoch(self) -> float:
        """How many steps take each row once."""
        return len(self.rows) / self.order.rows_per_step

    def called(self, step: int) -> list[str]:
        """The rows of this process in `step` (from 0), in words, one text per forward."""
        batches = self.order.indices(step, self.replica)
        return [", ".join(map(self.rows.called, batch)) for batch in batches]

    def identity(self) -> dict[str, Any]:
        """Equal for runs whose steps have equal rows."""
        rows = {"rows": self.rows.digest(), "num_rows": len(self.rows)}
        return {**rows, "rows_per_step": self.order.rows_per_step}

    def document(self, step: int) -> torch.Tensor:
        """The tokens of the longest document in this replica's first row of `step` (from 0)."""
        row = self.rows[self.order.indices(step, self.replica)[0][0]]
        ids = torch.tensor(row["input_ids"])
        return max(ids.split(row.get("seq_lengths", [len(ids)])), key=len)

    def metrics(self) -> dict[str, float]:
        """What every line of metrics.jsonl says about the rows."""
        return {} if self.rows.edges is None else {"packing_efficiency": self.rows.efficiency}


def build_data(settings: Settings, tokenizer: Any) -> Data:
    """Find the rows of the text, which one process of each machine makes, and their order."""
    config = settings.sequence_parallelism()
    replica, group_rank, replicas = world_place(config)
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
    return Data(rows, order, collator, replica, evaluation_rows(settings, tokenizer))


def micro_batches(data: Data, steps: range) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this process's shard for each forward of these steps."""
    for step in steps:
        for rows in data.order.micro_batches(step, data.replica):
            yield data.collator(rows)


def evaluation_batches(data: Data) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this process's shard for each forward over the evaluation rows, each of which one
    replica has. All replicas have as many forwards: one without a row left has no labels."""
    rows, size = data.evaluation, data.order.batch_size
    assert rows is not None
    unlabelled = rows[0] | {"labels": [IGNORE_INDEX] * len(rows[0]["input_ids"])}
    for first in range(0, len(rows), size * data.order.replicas):
        start = first + size * data.replica
        mine = [rows[index] for index in range(start, min(start + size, len(rows)))]
        yield data.collator(mine or [unlabelled])
