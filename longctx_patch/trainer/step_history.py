"""`longctx_steps.json` in a trainer's checkpoint: what was known of its steps, so that a run that
goes on judges the next ones as the run before would have."""

import json
import math
from pathlib import Path
from typing import Any

from longctx_patch.health.finite import StepHistory
from longctx_patch.plugin.together import of_all_ranks, own_rank, refuse_together

HISTORY = "longctx_steps.json"


def write_history(folder: str | Path, history: StepHistory) -> None:
    """Write it, as strict JSON."""
    content = {"num_skipped": history.num_skipped, "losses": history.losses}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    (Path(folder) / HISTORY).write_text(text, encoding="utf-8")


def read_history(folder: str | Path) -> StepHistory | None:
    """What `write_history` wrote; None where another trainer or an older version saved.

    Collective: all ranks have that of rank 0, and ValueError for a file that can't be it.
    """
    path, found, problems = Path(folder) / HISTORY, None, list[str]()
    if own_rank() == 0 and path.is_file():
        try:
            found = _history(json.loads(path.read_text("utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            problems.append(
                f"{path} is not what a trainer wrote ({error}): skipped steps and the losses of "
                "the last ones. Get it back from a copy, or delete it to judge steps anew."
            )
    refuse_together(problems)
    return of_all_ranks(found)[0]


def _history(content: Any) -> StepHistory:
    skipped, losses = content["num_skipped"], content["losses"]
    if type(skipped) is not int or skipped < 0:
        raise ValueError(f"num_skipped is {skipped!r}")
    if not all(type(loss) is float and math.isfinite(loss) for loss in losses):
        raise ValueError("losses are not all finite numbers")
    return StepHistory(num_skipped=skipped, losses=losses)
