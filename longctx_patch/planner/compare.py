"""Candidates side by side: which one is chosen, and how much longer the others take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longctx_patch.config import LongContextConfig
from longctx_patch.planner.attention_cost import Prediction, Workload, predict
from longctx_patch.planner.degrees import (
    NO_RECURRENCE,
    TIE,
    best_way,
    decide,
    ring_ranks_in_node,
    serves,
)
from longctx_patch.planner.machines import Hardware
from longctx_patch.planner.recurrent_cost import RecurrentWork
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS, SPARSE_PLAN, has_full_nodes
from longctx_patch.rules.text_table import aligned
from longctx_patch.sequence.layout import LayoutName

_NOTE = (
    f"Of what is as fast within {TIE:.1%} the larger Ulysses degree is chosen, then fewer bytes, "
    "for both directions together. docs/how-to/choose-degrees.md says what the columns are."
)
_HEADER = (
    *("plan", "direction", "time", "exposed", "imbalance", "waiting"),
    *("MiB sent", "MiB buffers", "more time"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate for one direction."""

    prediction: Prediction
    chosen: bool
    slower: float
    """How much longer it takes than what is chosen, as a share of that."""

    def as_json(self) -> dict[str, Any]:
        return self.prediction.as_json() | {"chosen": self.chosen, "slower": self.slower}


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
        return "\n".join([*aligned(table), "", _NOTE, *self._how_to_use()])

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
        "chosen" if row.chosen else f"{row.slower:+.1%}",
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
    others = [*_settings(workload, hardware, ranks), chosen]
    rows = (row for d in directions for row in _rows(chosen, others, workload, hardware, d))
    return Comparison(tuple(rows))


def _settings(workload: Workload, hardware: Hardware, ranks: int) -> Iterator[Setting]:
    """Returns what `compare` looks at: all plans on all ranks, then Ulysses of each degree."""
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


def _rows(
    chosen: Setting,
    settings: Sequence[Setting],
    workload: Workload,
    hardware: Hardware,
    direction: Direction,
) -> list[Row]:
    """One direction's candidates, the fastest first."""
    found = {
        _key(setting, direction): setting
        for setting in settings
        if serves(setting.plan_of(direction), direction)
    }
    predicted = {
        key: predict(setting, direction, workload, hardware) for key, setting in found.items()
    }
    winner = predicted[_key(chosen, direction)]
    return [
        Row(
            prediction=prediction,
            chosen=prediction is winner,
            slower=prediction.makespan_s / winner.makespan_s - 1,
        )
        for prediction in sorted(predicted.values(), key=lambda each: each.makespan_s)
    ]


def _key(setting: Setting, direction: Direction) -> tuple[object, ...]:
    """Returns what tells candidates of one direction apart; without a ring the layout doesn't."""
    layout = setting.layout if setting.ring_degree > 1 else None
    return setting.ulysses_degree, layout, setting.name(direction)
