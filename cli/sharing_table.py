"""The ways to share a step that were compared, as a run folder records them."""

from collections.abc import Sequence
from typing import Any

from longctx_patch.choose.sharing import reason
from longctx_patch.cli.step_sharing import Sharing
from longctx_patch.predict.machines import GIB

SECTION = """
These ways to share the {rows} rows of a step were compared. Numbers are predicted for {gpus}, with
rows of {seq_len:,} tokens that see all before them. GPUs that don't share a row train other rows at
the same time; *forwards* are the rows that each trains in a step, one after the other.

{lines}
{others}"""
HEADER = (
    *("GPUs per row", "ulysses x ring", "rows at once", "forwards", "s per step"),
    *("tokens/s per GPU", "GiB of a GPU", "GiB of a host", ""),
)


def compared_as_json(sharing: Sharing) -> list[dict[str, Any]]:
    """The ways, in types that JSON has; empty where the degrees were not chosen by the step."""
    chosen = sharing.predicted
    return [
        {
            "sequence_degree": result.candidate.sequence_degree,
            "ulysses": result.candidate.ulysses,
            "ring": result.candidate.ring,
            "rows_at_once": result.rows_at_once,
            "gradient_accumulation_steps": result.forwards,
            "step_s": result.time.total,
            "tokens_per_second_per_gpu": result.tokens_per_second_per_gpu,
            "memory_bytes": result.memory.total,
            "host_bytes": result.host_bytes,
            "reason": reason(result, chosen),
        }
        for result in sharing.compared
        if chosen is not None
    ]


def sharing_section(sharing: Sharing) -> str:
    """The part of the README that compares them; empty where there is nothing to compare."""
    if sharing.predicted is None or not sharing.compared:
        return ""
    job, ways = sharing.predicted.job, compared_as_json(sharing)
    others = f"Not possible: {'; '.join(sharing.not_possible)}.\n" if sharing.not_possible else ""
    return SECTION.format(
        rows=job.rows_per_step,
        gpus=job.cluster,
        seq_len=job.seq_len,
        lines="\n".join([_row(HEADER), _row(["---"] * len(HEADER)), *map(_line, ways)]),
        others=f"\n{others}" if others else "",
    )


def _line(way: dict[str, Any]) -> str:
    return _row(
        (
            f"{way['sequence_degree']}",
            f"{way['ulysses']} x {way['ring']}",
            f"{way['rows_at_once']}",
            f"{way['gradient_accumulation_steps']}",
            f"{way['step_s']:.3g}",
            f"{way['tokens_per_second_per_gpu']:,.0f}",
            f"{way['memory_bytes'] / GIB:.0f}",
            f"{way['host_bytes'] / GIB:.0f}",
            way["reason"],
        )
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
