"""Decides which rank a job waits for, from all ranks' beats, and says it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from longctx_patch.health.beats import Beat
from longctx_patch.health.last_words import State

MOST_LINES = 8
_ORDER = ("start", "step", "evaluate", "save", "end")


class Verdict(NamedTuple):
    guilty: tuple[int, ...]
    """Ranks that the others wait for; none where that can't be told."""
    text: str
    """A line for each of them, and where the others wait."""


def judge(beats: Mapping[int, Beat], ranks: Iterable[int], states: Mapping[int, State]) -> Verdict:
    """Who holds the job up.

    Args:
        beats: every rank's newest, after the time that they have to answer an alarm.
        ranks: those of which something should be known.
        states: of processes of this machine.
    """
    found = _silent(beats, ranks, states) or _ended(beats) or _behind(beats) or _busy(beats)
    lines = list(found.values())
    if not found and len(beats) > 1:
        lines = ["Every rank gives signs of life, and none is behind: they wait for each other."]
    others = [beats[rank] for rank in sorted(beats) if rank not in found]
    return Verdict(tuple(found), "\n".join([*lines, *_waiting(others)]))


def lost(beats: Sequence[Beat]) -> str:
    """The beginning of a sentence about ranks that are gone; nothing where none is."""
    if len(beats) > 1:
        ranks = ", ".join(str(beat.rank) for beat in beats)
        return f"ranks {ranks} are gone (a launcher ends all after the first); "
    return "".join(f"rank {beat.rank} (process {beat.pid}) is gone; " for beat in beats)


def _silent(
    beats: Mapping[int, Beat], ranks: Iterable[int], states: Mapping[int, State]
) -> dict[int, str]:
    """Ranks whose process has stopped or is gone, or whose machine doesn't answer."""
    found = {}
    for rank in ranks:
        last, state = beats.get(rank), states.get(rank, "runs")
        if last is None:
            found[rank] = f"rank {rank} has never come."
        elif state == "gone" and last.phase != "end":
            found[rank] = f"{_named(last)} is gone: killed, perhaps{_seen(last)}."
        elif state == "stopped":
            found[rank] = f"{_named(last)} was stopped by a signal{_seen(last)}."
        elif not last.place:
            found[rank] = f"{_named(last)} gives no sign of life any more{_seen(last)}."
    return found


def _ended(beats: Mapping[int, Beat]) -> dict[int, str]:
    """Ranks that have come to their end while others wait in a step."""
    ended = {
        rank: f"{_named(beat)} has come to {beat.at}, and the others wait for it."
        for rank, beat in sorted(beats.items())
        if beat.phase == "end"
    }
    return ended if any(beat.phase == "step" and beat.waits for beat in beats.values()) else {}


def _behind(beats: Mapping[int, Beat]) -> dict[int, str]:
    """Ranks that have done less than others."""
    done = {rank: (beat.step, _ORDER.index(beat.phase)) for rank, beat in beats.items()}
    most = max(done.values(), default=None)
    return {
        rank: f"{_named(beats[rank])} is behind, in {beats[rank].at}: {beats[rank].place}."
        for rank in sorted(done)
        if done[rank] != most
    }


def _busy(beats: Mapping[int, Beat]) -> dict[int, str]:
    """Ranks that don't wait for others while others do."""
    busy = {
        rank: f"{_named(beat)} doesn't wait for others in {beat.at}: {beat.place}."
        for rank, beat in sorted(beats.items())
        if beat.place and not beat.waits
    }
    return busy if len(busy) < len(beats) else {}


def _waiting(others: list[Beat]) -> list[str]:
    lines = [f"rank {beat.rank}: {beat.at}, {beat.place or 'somewhere'}" for beat in others]
    more = [f"... and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [f"  {line}" for line in lines[:MOST_LINES] + more]


def _seen(beat: Beat) -> str:
    """Returns where it was, as far as its last beat knows."""
    return f"; last seen in {beat.at}" if beat.at else ""


def _named(beat: Beat) -> str:
    return f"rank {beat.rank} (process {beat.pid} on {beat.host})"
