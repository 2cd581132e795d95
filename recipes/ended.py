"""A run that has ended, started again by `--resume auto`: it is the same, a longer one, or another.

The same has nothing left to do, a longer one goes on from its newest checkpoint, and another one is
refused: its numbers would be believed to be those in the output.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longctx_patch.checkpoints.fingerprint import Change, Fingerprint, changes, plain
from longctx_patch.checkpoints.output_folder import Output
from longctx_patch.recipes.identity import defaults_of
from longctx_patch.recipes.run_record import ended_record
from longctx_patch.rules.together import of_all_ranks, own_rank, refuse_together


def is_over(output: Output, now: Fingerprint, settings: Any, length: Mapping[str, object]) -> bool:
    """Whether the run that is asked for has ended in the output; every process calls this.

    Args:
        now: its fingerprint, with which nothing was trained yet.
        length: the settings by name that say how long it is.

    Raises:
        ValueError: on all processes, if another run has ended there.
    """
    problems, over = [], False
    if own_rank() == 0 and output.resume == "auto" and (record := ended_record(output.folder)):
        over = all(record.get("settings", length).get(n) == value for n, value in length.items())
        others = _others(record, plain(now), settings)
        if others:
            problems.append(_another(output.folder, others, is_longer=not over))
        elif not over and not output.checkpoints.complete():
            problems.append(_no_checkpoint(output.folder))
    refuse_together(problems)
    return of_all_ranks(over)[0]


def _others(record: Mapping[str, Any], now: Fingerprint, settings: Any) -> list[Change]:
    """What another run has. Versions have no part in it, as nothing is trained any more."""
    then = record.get("fingerprint", now)
    if not now["weights"]:  # those of a hub name may be gone from this machine
        now = {**now, "weights": then["weights"]}
    found = changes(then, now, defaults=defaults_of(type(settings)))
    allowed = [*settings.allow_change, "versions"]
    return [each for each in found if not each.is_allowed(allowed)]


def _another(output: Path, others: Sequence[Change], *, is_longer: bool) -> str:
    listed = "\n  ".join(f"{e.name} is {e.now!r}, the run has {e.then!r}" for e in others)
    names = " ".join(sorted({each.flag_name for each in others}))
    longer = f" To train its model on, add --allow-change {names}." if is_longer else ""
    return (
        f"resume: the run in {output} has ended, and was another one:\n  {listed}\nGive a new "
        "output to train this one. What the run had is in its settings.json; with that, this "
        f"command says that it has ended.{longer}"
    )


def _no_checkpoint(output: Path) -> str:
    return (
        f"resume: the run in {output} has ended after another number of steps, and has no "
        "checkpoint to go on from. Give a new output to train for so long from the beginning."
    )
