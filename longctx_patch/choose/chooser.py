"""Choose plans by the cost model, and say why the others lost.

The fastest wins; among those as fast to within `TIE`, the one that sends least, since bytes that
are hidden today are the first to show on a slower link.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from longctx_patch.choose.comparison import TIE, Comparison, Row
from longctx_patch.config import (
    LAYOUTS_OF_PLAN,
    SPARSE_PLAN,
    LayoutName,
    LongContextConfig,
)
from longctx_patch.plans import Direction
from longctx_patch.predict.attention.costs import Prediction, Setting, Workload, predict
from longctx_patch.predict.machines import MACHINES, Hardware
from longctx_patch.sequence.placement import placement_of

MOST_WAVES = 2
"""Of Ulysses, unless more are asked for: three and more were no faster wherever it was measured."""

_HYBRIDS = ("zigzag", "zigzag_direct", "allgather")
"""Ring parts that `compare` tries under Ulysses."""


def compare(
    workload: Workload,
    hardware: Hardware,
    ranks: int,
    directions: Sequence[Direction] = tuple(Direction),
) -> Comparison:
    """Every plan on `ranks` ranks, Ulysses, and a few products of both.

    Forward and backward may follow different plans but share degrees and layout, so the winners are
    the pair whose times together are least.
    """
    return _compare(list(_settings(workload, hardware, ranks)), workload, hardware, directions)


def explain(
    config: LongContextConfig,
    workload: Workload,
    directions: Sequence[Direction] = tuple(Direction),
) -> Comparison:
    """What a config runs, beside all that its degrees, layout and hardware allow.

    With `plan="auto"` the chosen rows are those that the cost model takes.
    """
    hardware = MACHINES[config.hardware]
    config = replace(config, ulysses_waves=choose_waves(config, workload))
    settings = _settings_of(config, hardware)
    chosen = {d: choose_for(config, d, workload) for d in directions}
    if not workload.is_causal and config.ring_degree > 1:
        settings = list(dict.fromkeys(chosen.values()))
    plans = {direction: setting.plan for direction, setting in chosen.items()}
    return _compare(settings, workload, hardware, directions, plans)


def choose_for(
    config: LongContextConfig,
    direction: Direction,
    workload: Workload,
    hardware: Hardware | None = None,
) -> Setting:
    """`choose`, for the documents and the window of the workload."""
    return choose(
        config,
        direction,
        workload,
        hardware,
        placement=placement_of(config, workload.documents()),
        is_causal=workload.is_causal,
    )


@lru_cache(maxsize=1024)
def choose(
    config: LongContextConfig,
    direction: Direction,
    workload: Workload,
    hardware: Hardware | None = None,
    *,
    placement: LayoutName | None = None,
    is_causal: bool = True,
) -> Setting:
    """The config with the plan of one direction decided, by the cost model where it is `auto`.

    `hardware`: another than the preset that the config names. `placement`: another than that of a
    row with one document. A mask that is not plain causal leaves blocks out, and `auto` takes the
    plan that sends only what is needed.
    """
    if config.ulysses_waves is None:
        config = replace(config, ulysses_waves=choose_waves(config, workload, hardware))
    plan: str = config.plan if direction is Direction.FORWARD else config.backward_plan
    if plan == "auto" and direction is Direction.BACKWARD and config.plan != "auto":
        plan = config.plan
    if not _serves(plan, direction):
        plan = config.placement  # burst's forward is the ring of its layout, named alike
    if not is_causal and plan == "auto":
        plan = SPARSE_PLAN
    if plan != "auto":
        setting = _setting(config, plan, config.ranks_per_node)
        return replace(setting, layout=placement or setting.layout)
    hardware = hardware or MACHINES[config.hardware]
    candidates = [s for s in _settings_of(config, hardware) if _serves(s.plan, direction)]
    if len(candidates) == 1:
        return candidates[0]
    return _best([_predicted(s, direction, workload, hardware) for s in candidates]).setting


def choose_waves(
    config: LongContextConfig, workload: Workload, hardware: Hardware | None = None
) -> int:
    """In how many waves Ulysses exchanges heads: those of forward are backward's too.

    Of a plan that is `auto` the first of its layout is looked at, which is enough to tell.
    """
    if config.ulysses_waves is not None:
        return config.ulysses_waves
    hardware = hardware or MACHINES[config.hardware]
    setting = (
        _settings_of(config, hardware)[0]
        if config.plan == "auto"
        else _setting(config, config.plan, config.ranks_per_node)
    )
    return best_waves(setting, workload, hardware)


@lru_cache(maxsize=1024)
def best_waves(setting: Setting, workload: Workload, hardware: Hardware) -> int:
    """The number of waves in which forward and backward together are fastest.

    A wave hides messages and costs the CPU, so small blocks go in one. Of documents only how many
    pairs they leave counts: rows differ, and each would be simulated.
    """
    if setting.ulysses_degree == 1:
        return 1
    workload = workload.alike()
    directions = [direction for direction in Direction if _serves(setting.plan, direction)]

    def seconds(waves: int) -> float:
        fixed = replace(setting, ulysses_waves=waves)
        return sum(predict(fixed, d, workload, hardware).makespan_s for d in directions)

    return min(range(1, MOST_WAVES + 1), key=seconds)


class _Candidate(NamedTuple):
    setting: Setting
    prediction: Prediction

    @property
    def total_bytes(self) -> int:
        return sum(self.prediction.bytes_sent_per_rank)


def _predicted(
    setting: Setting, direction: Direction, workload: Workload, hardware: Hardware
) -> _Candidate:
    return _Candidate(setting, predict(setting, direction, workload, hardware))


def _best(candidates: Iterable[_Candidate]) -> _Candidate:
    """The one of fewest bytes among the fastest."""
    candidates = list(candidates)
    fastest = min(candidate.prediction.makespan_s for candidate in candidates)
    tied = [c for c in candidates if c.prediction.makespan_s <= fastest * (1 + TIE)]
    return min(tied, key=lambda c: (c.total_bytes, c.prediction.peak_buffer_bytes))


def _serves(plan: str, direction: Direction) -> bool:
    """Burst is a backward; its forward is the zigzag ring."""
    return plan != "burst" or direction is Direction.BACKWARD


def _settings_of(config: LongContextConfig, hardware: Hardware) -> list[Setting]:
    """What `auto` may choose from: the plans of the config's layout; without a ring all are one."""
    per_node = config.ranks_per_node or _ring_ranks_in_node(config.ulysses_degree, hardware)
    asked = (config.plan, config.backward_plan)
    plans = [
        plan
        for plan, layouts in LAYOUTS_OF_PLAN.items()
        if config.placement in layouts and (plan != SPARSE_PLAN or plan in asked)
    ]
    if config.ring_degree == 1:
        plans = plans[:1]
    return [
        _setting(config, plan, per_node if plan == "double_ring" else config.ranks_per_node)
        for plan in plans
        if plan != "double_ring" or _has_full_nodes(config.ring_degree, per_node)
    ]


def _setting(config: LongContextConfig, plan: str, ranks_per_node: int | None) -> Setting:
    return Setting(
        plan=plan,
        layout=config.placement,
        ulysses_degree=config.ulysses_degree,
        ring_degree=config.ring_degree,
        ulysses_waves=config.ulysses_waves or 1,
        ranks_per_node=ranks_per_node,
    )


def _settings(workload: Workload, hardware: Hardware, ranks: int) -> Iterable[Setting]:
    """What `compare` looks at: all plans on all ranks, then Ulysses of each degree."""
    for degree in range(1, min(ranks, workload.num_heads) + 1):
        if ranks % degree or (degree > hardware.gpus_per_node and degree < ranks):
            continue
        ring, per_node = ranks // degree, _ring_ranks_in_node(degree, hardware)
        for plan, layout in _plans_for(workload, degree, ring):
            if plan != "double_ring" or _has_full_nodes(ring, per_node):
                setting = Setting(
                    plan=plan,
                    layout=layout,
                    ulysses_degree=degree,
                    ring_degree=ring,
                    ranks_per_node=per_node,
                )
                yield replace(setting, ulysses_waves=best_waves(setting, workload, hardware))


def _plans_for(workload: Workload, degree: int, ring: int) -> list[tuple[str, LayoutName]]:
    """Plans of the ring part, and placements. Where the mask leaves blocks out it is `SPARSE_PLAN`:
    others move what nobody sees."""
    if ring == 1 or workload.is_causal:
        plans = LAYOUTS_OF_PLAN if degree == 1 else _HYBRIDS[: 1 if ring == 1 else None]
        return [(plan, LAYOUTS_OF_PLAN[plan][0]) for plan in plans if plan != SPARSE_PLAN]
    if not workload.documents().is_one:
        return [(SPARSE_PLAN, "balanced")]
    return [(SPARSE_PLAN, "zigzag"), (SPARSE_PLAN, "contiguous")]


def _ring_ranks_in_node(ulysses_degree: int, hardware: Hardware) -> int:
    return max(1, hardware.gpus_per_node // ulysses_degree)


def _has_full_nodes(ring_degree: int, per_node: int) -> bool:
    """Whether the double ring has two rings to turn."""
    return 1 < per_node < ring_degree and ring_degree % per_node == 0


def _compare(
    settings: list[Setting],
    workload: Workload,
    hardware: Hardware,
    directions: Sequence[Direction],
    chosen: Mapping[Direction, str] | None = None,
) -> Comparison:
    """`chosen`: the plan of each direction, if it has been decided already."""
    candidates = {
        direction: [
            _predicted(setting, direction, workload, hardware)
            for setting in settings
            if _serves(setting.plan, direction)
        ]
        for direction in directions
    }
    winners = _winners(candidates)
    if chosen is not None:
        for direction, found in candidates.items():
            taken = [c for c in found if c.setting.plan == chosen[direction]]
            winners |= {direction: taken[0]} if taken else {}
    rows = [
        Row(
            prediction=candidate.prediction,
            chosen=candidate is winners[direction],
            reason=_reason(candidate, winners[direction], asked=chosen is not None),
        )
        for direction, found in candidates.items()
        for candidate in sorted(found, key=lambda c: c.prediction.makespan_s)
    ]
    return Comparison(tuple(rows))


def _winners(candidates: dict[Direction, list[_Candidate]]) -> dict[Direction, _Candidate]:
    """The best of each direction, under the degrees and layout that are best for all together."""
    shared: dict[tuple[int, LayoutName], dict[Direction, _Candidate]] = {}
    for direction, found in candidates.items():
        for key in {(c.setting.ulysses_degree, c.setting.layout) for c in found}:
            of_key = [c for c in found if (c.setting.ulysses_degree, c.setting.layout) == key]
            shared.setdefault(key, {})[direction] = _best(of_key)
    complete = [best for best in shared.values() if len(best) == len(candidates)]

    def seconds(best: dict[Direction, _Candidate]) -> float:
        return sum(candidate.prediction.makespan_s for candidate in best.values())

    fastest = min(seconds(best) for best in complete)
    tied = [best for best in complete if seconds(best) <= fastest * (1 + TIE)]
    return min(tied, key=lambda best: sum(c.total_bytes for c in best.values()))


def _reason(candidate: _Candidate, winner: _Candidate, *, asked: bool) -> str:
    """`asked`: whether the winner was asked for, and not chosen among these."""
    if candidate is winner:
        return "chosen"
    mine, best = candidate.prediction, winner.prediction
    sends, ratio = _sends(candidate, winner)
    extra_s = mine.makespan_s - best.makespan_s
    if extra_s < -TIE * best.makespan_s:
        but = "not what was asked for" if asked else "not together with the other direction"
        return f"{-extra_s / best.makespan_s:.1%} faster, but {but}"
    if extra_s > TIE * best.makespan_s:
        waits_s = mine.exposed_communication_s - best.exposed_communication_s
        # Ranks that share next to nothing don't wait for each other in each step.
        if mine.plan != SPARSE_PLAN and mine.idle_fraction > best.idle_fraction + TIE:
            why = f"idle for {mine.idle_fraction:.0%} of the time"
        elif waits_s > extra_s / 2:
            why = f"waits {waits_s * 1e3:.1f} ms longer for messages"
        else:
            why = "kernels, copies or the CPU take longer"
        why += f", {sends}" if ratio > 1.2 else ""
        return f"{extra_s / best.makespan_s:.1%} slower: {why}"
    if candidate.total_bytes > winner.total_bytes:
        return f"as fast, but {sends}"
    if candidate.setting.layout != winner.setting.layout:
        return "as fast, but not together with the other direction in its layout"
    if candidate.setting.ulysses_degree != winner.setting.ulysses_degree:
        return "as fast, but not together with the other direction at its degrees"
    return "as fast, but holds more in buffers"


def _sends(candidate: _Candidate, winner: _Candidate) -> tuple[str, float]:
    """In words, and as a share of what the winner sends."""
    if not winner.total_bytes and candidate.total_bytes:
        mean = candidate.total_bytes / candidate.prediction.ranks
        return f"sends {mean / 2**20:,.0f} MiB, the chosen one nothing", inf
    ratio = candidate.total_bytes / max(1, winner.total_bytes)
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return f"sends {times} times the bytes" if ratio > 1.05 else "sends a little more", ratio
