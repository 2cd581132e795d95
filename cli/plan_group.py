"""`longctx plan --branches`: rows that begin alike, each by itself and as one row with branches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from longctx_patch.cli.plan_report import fastest_of_each, window_note
from longctx_patch.planner.job import Job
from longctx_patch.planner.machines import GIB
from longctx_patch.planner.search import Result, search
from longctx_patch.rules.text_table import aligned
from longctx_patch.sequence.documents import Documents

_HEADER = ("sp", "checkpoint", "apart: s", "peak GiB", "once: s", "peak GiB", "times as fast")
_MEANING = """
s: seconds of a step for one group; -: it does not fit. apart: the rows of a group in one forward;
once: as one row, in which what they share is computed once (share_prefixes="auto")."""


class Compared(NamedTuple):
    """The fastest of one number of GPUs that share a row and one checkpoint policy."""

    apart: Result
    once: Result

    @property
    def faster(self) -> float:
        return _seconds(self.apart) / _seconds(self.once)


def compare_group(job: Job, count: int, own: int) -> list[Compared]:
    """So many rows that differ in their last `own` tokens, of `job.seq_len` each; the fastest with
    branches comes first. Raises ValueError for rows that share nothing."""
    together = Documents.group(job.seq_len, count, own)
    alone = Documents((job.seq_len,) * count, count * job.seq_len)
    apart, once = (
        fastest_of_each(search(replace(job, seq_len=row.num_tokens, row=row)))
        for row in (alone, together)
    )
    of_apart = {kind(result): result for result in apart}
    return [Compared(of_apart[kind(result)], result) for result in once if result.fits]


def kind(result: Result) -> tuple[int, str]:
    """How many GPUs share a row, and the checkpoint policy."""
    return result.candidate.sequence_degree, result.candidate.checkpoint


def _seconds(result: Result) -> float:
    return result.time.total / result.rows_at_once


def as_json(job: Job, count: int, own: int, found: Sequence[Compared]) -> dict[str, Any]:
    """What was compared, in types that JSON has."""
    keys = {"model": job.shape.name, "gpus": str(job.cluster), "seq_len": job.seq_len}
    rows = [
        dict(zip(("sp", "checkpoint"), kind(pair.once), strict=True))
        | {name: _as_json(result) for name, result in pair._asdict().items()}
        for pair in found
    ]
    return keys | {"branches": [count, own], "compared": rows}


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "fits": result.fits,
        "seconds": _seconds(result),
        "peak_gib": result.memory.total / GIB,
        "plan": result.candidate.plan,
    }


def render(job: Job, count: int, own: int, found: Sequence[Compared]) -> str:
    """A line for each number of GPUs that share a row and each checkpoint policy."""
    how = f"LoRA of rank {job.lora_rank}" if job.lora else "every weight"
    title = (
        f"{job.shape.name} on {job.cluster}, groups of {count} rows of {job.seq_len:,} tokens that "
        f"differ in their last {own:,}, {how}."
    )
    if not found:
        return f"{title}\n\nNothing fits, not even with what rows share computed once."
    return "\n".join(
        [title, "", *aligned([_HEADER, *map(columns, found)]), _MEANING, *window_note(job)]
    )


def columns(pair: Compared) -> tuple[str, ...]:
    """A line of the table."""
    degree, checkpoint = kind(pair.once)
    cells = [str(degree), checkpoint]
    for result in pair:
        seconds = f"{_seconds(result):.2f}" if result.fits else "-"
        cells += [seconds, f"{result.memory.total / GIB:.1f}"]
    return (*cells, f"{pair.faster:.2f}" if pair.apart.fits else "-")
