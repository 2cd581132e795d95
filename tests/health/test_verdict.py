"""Who holds a job up, from beats alone."""

import re

import pytest

from longctx_patch.health.beats import Beat
from longctx_patch.health.last_words import State
from longctx_patch.health.verdict import judge


def beat(rank: int, step: int = 5, phase: str = "step", **more: object) -> Beat:
    values = {"place": f"place {rank}", "waits": True} | more
    return Beat(rank, phase, step, 1.0, f"step {step}", "host", 40 + rank, 0.0, **values)  # type: ignore[arg-type]


def answers(*beats: Beat, silent: tuple[int, ...] = ()) -> dict[int, Beat]:
    """Ranks that are silent have not said where they are."""
    return {b.rank: b._replace(place="") if b.rank in silent else b for b in beats}


WAITING = (beat(0), beat(1), beat(2))
CASES: dict[str, tuple[dict[int, Beat], dict[int, State], tuple[int, ...], str]] = {
    "stopped by a signal": (
        answers(*WAITING, silent=(1,)),
        {1: "stopped"},
        (1,),
        r"rank 1 \(process 41 on host\) was stopped by a signal; last seen in step 5\.",
    ),
    "killed": (answers(*WAITING, silent=(2,)), {2: "gone"}, (2,), "rank 2 .* is gone: killed"),
    "silent on another machine": (
        answers(*WAITING, silent=(0,)),
        {},
        (0,),
        "rank 0 .* gives no sign of life",
    ),
    "never came": (answers(*WAITING[:2]), {}, (2,), "rank 2 has never come"),
    "a step behind": (
        answers(beat(0), beat(1), beat(2, step=4)),
        {},
        (2,),
        "rank 2 .* is behind, in step 4: place 2",
    ),
    "still saving": (
        answers(beat(0), beat(1, step=4, phase="save"), beat(2)),
        {},
        (1,),
        "rank 1 .* is behind",
    ),
    "busy with something else": (
        answers(beat(0, waits=False), beat(1), beat(2)),
        {},
        (0,),
        "rank 0 .* doesn't wait for others in step 5: place 0",
    ),
    "at its end": (
        answers(beat(0), beat(1), beat(2, phase="end")),
        {2: "gone"},
        (2,),
        "rank 2 .* has come to step 5, and the others wait for it",
    ),
    "all wait": (answers(*WAITING), {}, (), "Every rank gives signs of life"),
    "all are busy": (
        answers(*(b._replace(waits=False) for b in WAITING)),
        {},
        (),
        "Every rank gives signs of life",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_guilty_rank_is_named_and_where_the_others_wait(case: str) -> None:
    read, states, guilty, text = CASES[case]
    found = judge(read, range(3), states)
    assert found.guilty == guilty
    first, *others = found.text.splitlines()
    assert re.match(text, first)
    waiting = [rank for rank in range(3) if rank not in guilty and rank in read]
    shown = others[max(0, len(guilty) - 1) :]
    assert shown == [f"  rank {rank}: {read[rank].at}, place {rank}" for rank in waiting]


def test_of_many_ranks_some_are_shown() -> None:
    beats = [beat(rank) for rank in range(20)]
    lines = judge(answers(*beats, silent=(3,)), range(20), {}).text.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "  ... and 11 more"
