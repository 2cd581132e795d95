"""Candidates side by side: which one is chosen, and why the others are not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longctx_patch.config import LongContextConfig
from longctx_patch.planner.attention_cost import Prediction, Workload, predict
from longctx_patch.planner.degrees import (
    NO_RECURRENCE,
    TIE,
    best_way,
    decide,
    ring_ranks_in_node,
    serves,
    ways,
)
from longctx_patch.planner.machines import Hardware
from longctx_patch.planner.recurrent_cost import RecurrentWork
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS, SPARSE_PLAN, has_full_nodes
from longctx_patch.sequence.layout import LayoutName

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


def compare(
    workload: Workload,
    hardware: Hardware,
    ranks: int,
    directions: Sequence[Direction] = tuple(Direction),
    recurrent: Mapping[RecurrentWork, float] = NO_RECURRENCE,
) -> Comparison:
    """Every plan on `ranks` ranks, Ulysses, and a few products of both.

    What is chosen is what `longctx patch` would write for such a row on such a machine. Forward and
    backward may follow different plans but share degrees and layout. `recurrent`: how many
    recurrent layers there are for each of these; their time counts where degrees are chosen.
    """
    way = best_way({workload: 1}, hardware, ranks, recurrent=recurrent)
    chosen = decide(way.applied_to(LongContextConfig()), workload, hardware)
    heads, per_node = workload.num_kv_heads, hardware.gpus_per_node
    allowed = {w.ulysses for w in ways(ranks, num_kv_heads=heads, gpus_per_node=per_node)}
    others = list(_settings(workload, hardware, ranks))
    asked = _Question(chosen, workload, hardware, frozenset(allowed))
    return Comparison(tuple(row for d in directions for row in _rows(asked, others, d)))


class _Question(NamedTuple):
    """What is compared, and what was decided."""

    chosen: Setting
    workload: Workload
    hardware: Hardware
    allowed_ulysses: frozenset[int]
    """Ulysses degrees that may be chosen."""


class _Candidate(NamedTuple):
    setting: Setting
    prediction: Prediction


def _settings(workload: Workload, hardware: Hardware, ranks: int) -> Iterator[Setting]:
    """What `compare` looks at: all plans on all ranks, then Ulysses of each degree."""
    for degree in range(1, min(ranks, workload.num_heads) + 1):
        if ranks % degree or (degree > hardware.gpus_per_node and degree < ranks):
            continue
        ring, per_node = ranks // degree, ring_ranks_in_node(degree, hardware)
        for plan, layout in _plans_for(workload, degree, ring):
            if not PLANS[plan].needs_full_nodes or has_full_nodes(ring, per_node):
                yield Setting(
                    plan=plan,
                    layout=layout,
                    ulysses_degree=degree,
                    ring_degree=ring,
                    ranks_per_node=per_node,
                )


def _plans_for(workload: Workload, degree: int, ring: int) -> list[tuple[str, LayoutName]]:
    """(plan of the ring part, placement) pairs. Where the mask leaves blocks out the plan is
    `SPARSE_PLAN`: others move what nobody sees."""
    if ring == 1 or workload.is_causal:
        found = [
            (plan, record.layouts[0])
            for plan, record in PLANS.items()
            if not record.is_sparse and (degree == 1 or record.goes_with_ulysses)
        ]
        return found if ring > 1 or degree == 1 else found[:1]
    if not workload.documents().is_one:
        return [(SPARSE_PLAN, "balanced")]
    return [(SPARSE_PLAN, "zigzag"), (SPARSE_PLAN, "contiguous")]


def _rows(asked: _Question, others: Sequence[Setting], direction: Direction) -> list[Row]:
    """One direction's candidates, the fastest first."""
    found: dict[tuple[object, ...], _Candidate] = {}
    for setting in (*others, asked.chosen):
        key = _key(setting, direction)
        if key not in found and serves(setting.plan_of(direction), direction):
            prediction = predict(setting, direction, asked.workload, asked.hardware)
            found[key] = _Candidate(setting, prediction)
    winner = found[_key(asked.chosen, direction)]
    return [
        Row(
            prediction=candidate.prediction,
            chosen=candidate is winner,
            reason=_reason(candidate, winner, asked),
        )
        for candidate in sorted(found.values(), key=lambda c: c.prediction.makespan_s)
    ]


def _key(setting: Setting, direction: Direction) -> tuple[object, ...]:
    """What tells candidates of one direction apart; without a ring the layout doesn't."""
    layout = setting.layout if setting.ring_degree > 1 else None
    return setting.ulysses_degree, layout, setting.name(direction)


def _reason(candidate: _Candidate, winner: _Candidate, asked: _Question) -> str:
    """Why a candidate was chosen, or was not; the columns say what takes it longer."""
    if candidate is winner:
        return "chosen"
    slower = candidate.prediction.makespan_s / winner.prediction.makespan_s - 1
    if slower > TIE:
        return f"{slower:.1%} slower"
    how = f"{-slower:.1%} faster" if slower < -TIE else "as fast"
    ulysses = candidate.setting.ulysses_degree
    if ulysses not in asked.allowed_ulysses:
        return f"{how}, but Ulysses would send key-value heads twice or leave the node"
    if slower >= -TIE and ulysses < winner.setting.ulysses_degree:
        return f"{how}, but with Ulysses over fewer ranks"
    return f"{how}, but not what all layers run in both directions"
