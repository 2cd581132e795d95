"""Which rank a job waits for, from two readings of all ranks' beats, and how to say it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from longctx_patch.health.beats import Beat, Readings
from longctx_patch.health.last_words import State

MOST_LINES = 8
_ORDER = ("start", "step", "evaluate", "save", "end")


class Verdict(NamedTuple):
    guilty: tuple[int, ...]
    """Ranks that the others wait for; none where that can't be told."""
    text: str
    """A line for each of them, and where the others wait."""


def judge(readings: Readings, ranks: Iterable[int], states: Mapping[int, State]) -> Verdict:
    """Who holds the job up.

    Args:
        readings: every rank's beats.
        ranks: those of which something should be known.
        states: of processes of this machine.
    """
    after = readings.after
    found = _silent(readings, ranks, states) or _ended(after) or _behind(after) or _busy(after)
    lines = list(found.values())
    if not found and len(after) > 1:
        lines = ["Every rank gives signs of life, and none is behind: they wait for each other."]
    others = [after[rank] for rank in sorted(after) if rank not in found]
    return Verdict(tuple(found), "\n".join([*lines, *_waiting(others)]))


def lost(beats: Sequence[Beat]) -> str:
    """The beginning of a sentence about ranks that are gone; nothing where none is."""
    if len(beats) > 1:
        ranks = ", ".join(str(beat.rank) for beat in beats)
        return f"ranks {ranks} are gone (a launcher ends all after the first); "
    return "".join(f"rank {beat.rank} (process {beat.pid}) is gone; " for beat in beats)


def _silent(
    readings: Readings, ranks: Iterable[int], states: Mapping[int, State]
) -> dict[int, str]:
    """Ranks whose process has stopped or is gone, or whose machine doesn't answer."""
    before, after, _ = readings
    found = {}
    for rank in ranks:
        last = after.get(rank) or before.get(rank)
        state = states.get(rank, "runs")
        if last is None:
            found[rank] = f"rank {rank} has never come."
        elif state == "gone" and last.phase != "end":
            found[rank] = f"{_named(last)} is gone: killed, perhaps{_seen(last)}."
        elif state == "stopped":
            found[rank] = f"{_named(last)} was stopped by a signal{_seen(last)}."
        elif rank in before and before[rank].number == after[rank].number:
            found[rank] = f"{_named(last)} gives no sign of life any more{_seen(last)}."
    return found


def _ended(after: Mapping[int, Beat]) -> dict[int, str]:
    """Ranks that have come to their end while others wait in a step."""
    ended = {
        rank: f"{_named(beat)} has come to {beat.at}, and the others wait for it."
        for rank, beat in sorted(after.items())
        if beat.phase == "end"
    }
    return ended if any(beat.phase == "step" and beat.waits for beat in after.values()) else {}


def _behind(after: Mapping[int, Beat]) -> dict[int, str]:
    """Ranks that have done less than others."""
    done = {rank: (beat.step, _ORDER.index(beat.phase)) for rank, beat in after.items()}
    most = max(done.values(), default=None)
    return {
        rank: f"{_named(after[rank])} is behind, in {after[rank].at}: {after[rank].place}."
        for rank in sorted(done)
        if done[rank] != most
    }


def _busy(after: Mapping[int, Beat]) -> dict[int, str]:
    """Ranks that don't wait for others while others do."""
    busy = {
        rank: f"{_named(beat)} doesn't wait for others in {beat.at}: {beat.place}."
        for rank, beat in sorted(after.items())
        if beat.place and not beat.waits
    }
    return busy if len(busy) < len(after) else {}


def _waiting(others: list[Beat]) -> list[str]:
    lines = [f"rank {beat.rank}: {beat.at}, {beat.place or 'somewhere'}" for beat in others]
    more = [f"... and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [f"  {line}" for line in lines[:MOST_LINES] + more]


def _seen(beat: Beat) -> str:
    """Where it was, as far as its last beat knows."""
    return f"; last seen in {beat.at}" if beat.at else ""


def _named(beat: Beat) -> str:
    return f"rank {beat.rank} (process {beat.pid} on {beat.host})"
