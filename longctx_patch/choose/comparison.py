"""A table of candidates that says what each takes, which was chosen, and why."""

from dataclasses import dataclass
from typing import Any

from longctx_patch.choose.tie import TIE
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.table import SPARSE_PLAN
from longctx_patch.predict.attention.costs import Prediction

_NOTE = (
    f"As fast: within {TIE:.1%}; then the larger Ulysses degree wins, then fewer bytes. Forward "
    "and backward share degrees and layout. Exposed: time lost to messages, by waiting and by "
    "slower kernels. Imbalance: time in which ranks would wait for the busiest one, by FLOPs "
    "alone; waiting: time in which GPUs do wait, for messages, other ranks or the CPU. MiB: sent "
    "is the mean of the ranks, buffers the largest."
)
_HEADER = (
    *("plan", "direction", "time", "exposed", "imbalance", "waiting"),
    *("MiB sent", "MiB buffers", "why"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate for one direction."""

    prediction: Prediction
    chosen: bool
    reason: str

    def as_json(self) -> dict[str, Any]:
        return self.prediction.as_json() | {"chosen": self.chosen, "reason": self.reason}


@dataclass(frozen=True)
class Comparison:
    """All candidates, those of one direction together, best first."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [_HEADER]
        for row, after in zip(self.rows, (*self.rows[1:], None), strict=True):
            table.append(_columns(row))
            if after is not None and after.prediction.direction is not row.prediction.direction:
                table.append(("",) * len(_HEADER))
        widths = [max(len(line[i]) for line in table) for i in range(len(_HEADER))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        return "\n".join([*lines, "", _NOTE, *self._how_to_use()])

    def _how_to_use(self) -> list[str]:
        """The config that runs what was chosen."""
        chosen = [row.prediction for row in self.rows if row.chosen]
        if not chosen:
            return []
        ulysses, ranks = chosen[0].ulysses_degree, chosen[0].ranks
        fields = [f"ulysses_degree={ulysses}", f"ring_degree={ranks // ulysses}"]
        if ulysses < ranks and chosen[0].layout != "balanced":  # the default of packed rows
            fields.append(f"layout={chosen[0].layout!r}")
        if ulysses < ranks and chosen[0].plan != SPARSE_PLAN:  # which `auto` takes by itself
            names = {Direction.FORWARD: "plan", Direction.BACKWARD: "backward_plan"}
            fields += [f"{names[found.direction]}={found.plan!r}" for found in chosen]
        return [f"Chosen: LongContextConfig({', '.join(fields)})"]


def _columns(row: Row) -> tuple[str, ...]:
    found = row.prediction
    name = f"{found.plan} ({found.layout})" if found.plan == SPARSE_PLAN else found.plan
    if found.ulysses_degree not in (1, found.ranks):
        name = f"ulysses {found.ulysses_degree} x {name}"
    return (
        name,
        found.direction.value,
        f"{found.makespan_s * 1e3:.2f} ms",
        f"{found.exposed_communication_s * 1e3:.2f} ms",
        "-" if found.plan == SPARSE_PLAN else f"{found.idle_fraction:.1%}",
        f"{found.waiting_fraction:.1%}",
        f"{sum(found.bytes_sent_per_rank) / found.ranks / 2**20:,.0f}",
        f"{found.peak_buffer_bytes / 2**20:,.0f}",
        row.reason,
    )
