"""Candidates side by side: which one is chosen, and why the others are not."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from longctx_patch.choose.comparison import Comparison, Row
from longctx_patch.choose.degrees import NO_RECURRENCE, best_way, ways
from longctx_patch.choose.plans import (
    decide,
    ring_ranks_in_node,
    serves,
    settings_of,
)
from longctx_patch.choose.recurrence import RecurrentWork
from longctx_patch.choose.tie import TIE
from longctx_patch.config import LongContextConfig
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS, SPARSE_PLAN, has_full_nodes
from longctx_patch.predict.attention.costs import Prediction, Workload, predict
from longctx_patch.predict.machines import MACHINES, Hardware
from longctx_patch.sequence.layout import LayoutName


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
    asked = _Question(chosen, workload, hardware, frozenset(allowed), bool(recurrent))
    return Comparison(tuple(row for d in directions for row in _rows(asked, others, d)))


def explain(
    config: LongContextConfig,
    workload: Workload,
    directions: Sequence[Direction] = tuple(Direction),
) -> Comparison:
    """What a config runs, beside all plans that its degrees, layout and hardware allow.

    With `plan="auto"` the chosen rows are those of the rule that calls follow.
    """
    hardware = MACHINES[config.hardware]
    chosen = decide(config, workload)
    others: list[Setting] = []
    if workload.is_causal or config.ring_degree == 1:
        others = settings_of(config, hardware)
    asked = _Question(chosen, workload, hardware, None)
    return Comparison(tuple(row for d in directions for row in _rows(asked, others, d)))


class _Question(NamedTuple):
    """What is compared, and what was decided."""

    chosen: Setting
    workload: Workload
    hardware: Hardware
    allowed_ulysses: frozenset[int] | None
    """Ulysses degrees that may be chosen; None: a config names what runs."""
    has_recurrent: bool = False
    """Whether recurrent layers had a part in choosing degrees."""


class _Candidate(NamedTuple):
    setting: Setting
    prediction: Prediction

    @property
    def total_bytes(self) -> int:
        return sum(self.prediction.bytes_sent_per_rank)


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
    """Why a candidate was chosen, or was not."""
    if candidate is winner:
        return "chosen"
    best_s = winner.prediction.makespan_s
    extra_s = candidate.prediction.makespan_s - best_s
    if extra_s < -TIE * best_s:
        return f"{-extra_s / best_s:.1%} faster, but {_why_not(candidate, winner, asked)}"
    if extra_s > TIE * best_s:
        return f"{extra_s / best_s:.1%} slower: {_why_slower(candidate, winner)}"
    return f"as fast, but {_why_not_tied(candidate, winner, asked)}"


def _why_not(candidate: _Candidate, winner: _Candidate, asked: _Question) -> str:
    if asked.allowed_ulysses is None:
        return "not what was asked for"
    mine, best = candidate.setting.ulysses_degree, winner.setting.ulysses_degree
    if mine not in asked.allowed_ulysses:
        return "Ulysses would send key-value heads twice or leave the node"
    if mine != best and asked.has_recurrent:
        return "not together with recurrent layers"
    if candidate.setting.layout != winner.setting.layout:
        return "not in the layout that is best for both directions"
    return "not together with the other direction"


def _why_slower(candidate: _Candidate, winner: _Candidate) -> str:
    """The part of the GPUs' time that grew most, and what is sent if that is much more."""
    mine, best = candidate.prediction, winner.prediction
    waits_s = mine.waiting_fraction * mine.makespan_s - best.waiting_fraction * best.makespan_s
    extra_s = {
        "waits": waits_s,
        "its kernels take": mine.kernel_s - best.kernel_s,
        "copying and adding takes": mine.copy_s - best.copy_s,
    }
    part = max(extra_s, key=lambda name: extra_s[name])
    why = f"{part} {extra_s[part] * 1e3:.2g} ms longer"
    sends, ratio = _sends(candidate, winner)
    return f"{why}, {sends}" if ratio > 1.2 else why


def _why_not_tied(candidate: _Candidate, winner: _Candidate, asked: _Question) -> str:
    mine, best = candidate.setting, winner.setting
    if mine.ulysses_degree < best.ulysses_degree:
        return "with Ulysses over fewer ranks"
    if candidate.total_bytes > winner.total_bytes:
        return _sends(candidate, winner)[0]
    if (mine.ulysses_degree, mine.layout) != (best.ulysses_degree, best.layout):
        return _why_not(candidate, winner, asked)
    return "holds more in buffers"


def _sends(candidate: _Candidate, winner: _Candidate) -> tuple[str, float]:
    """What a candidate sends in words, and as a share of what the winner sends."""
    if not winner.total_bytes and candidate.total_bytes:
        mean = candidate.total_bytes / candidate.prediction.ranks
        return f"sends {mean / 2**20:,.0f} MiB, the chosen one nothing", inf
    ratio = candidate.total_bytes / max(1, winner.total_bytes)
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return f"sends {times} times the bytes" if ratio > 1.05 else "sends a little more", ratio
