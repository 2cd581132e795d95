"""Says what comes next for a run: to start it, to go on with it, or to use what it has trained."""

import json
import shlex
from pathlib import Path
from typing import Any

from longctx_patch.checkpoints.lock import job_of
from longctx_patch.recipes.model_card import ADAPTER_FILE, MARK, is_marked
from longctx_patch.recipes.models import is_bare_config
from longctx_patch.recipes.run_record import (
    PLAN_FILE,
    RECORD_FILE,
    ended_record,
    output_of,
    settings_file_of,
)


def next_of(settings_file: Path) -> str:
    """The line with what comes next for the run folder of a settings file; empty for another."""
    run = settings_file.parent
    if settings_file_of(run) != settings_file or not (run / "accelerate.yaml").is_file():
        return ""
    output = output_of(settings_file)
    if ended_record(output):
        return after_training(run, output / "final")
    if job_of(output)[1]:
        return f"Next: {_longctx('report', run)}"
    start = _json(run / PLAN_FILE).get("start", "")
    if str(run.resolve()) not in start:  # the folder was moved, or is of an earlier version
        start = _longctx("train", run)
    return f"Next: {start}{' --resume auto' * (output / RECORD_FILE).is_file()}"


def after_training(run: Path, final: Path, *done: str) -> str:
    """The line with what to do with the trained model in `final`, but for the commands that are
    `done`, and for those that don't take an adapter over random weights, or have run."""
    base = _json(final / ADAPTER_FILE).get("base_model_name_or_path") or ""
    is_whole, is_over_random = not (final / ADAPTER_FILE).is_file(), is_bare_config(base)
    done += ("eval",) * is_over_random
    done += ("merge",) * (is_whole or is_over_random or (final.parent / "merged").exists())
    each = {
        "eval": f"{_longctx('eval', run)} (does it use its context?)",
        "report": _longctx("report", run),
        "merge": _longctx("merge", final),
    }
    left = [words for name, words in each.items() if name not in done]
    return f"Next: {', then '.join(left)}" if left else f"Load it as {final / 'README.md'} says."


def ending(final: Path) -> str:
    """Returns what a recipe prints last: what is where, what to beware of, and the next command."""
    lines = [f"saved to {final}; metrics.jsonl beside it has a line per step or log"]
    if is_marked(final):
        lines.append(
            f"Load the adapter as {final / 'README.md'} says, with the config.json there: "
            f"AutoPeftModelForCausalLM would take the base's own RoPE. peft warns of it, by {MARK}."
        )
    output = final.parent
    file = settings_file_of(output.parent)
    is_of_folder = file is not None and output_of(file).resolve() == output.resolve()
    return "\n".join([*lines, after_training(output.parent if is_of_folder else output, final)])


def _longctx(command: str, folder: Path) -> str:
    return shlex.join(["longctx", command, str(folder)])


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
