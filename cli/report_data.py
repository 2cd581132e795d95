"""Reads what a run folder holds, for the page of `longctx report`."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from longctx_patch.recipes.metrics import METRICS_FILE, whole_lines
from longctx_patch.recipes.run_record import (
    FAILURE_FILE,
    PLAN_FILE,
    SETTINGS_FILES,
    settings_file_of,
)
from longctx_patch.recipes.stages import START_FILE
from longctx_patch.recipes.yaml_file import read_yaml

Points = list[tuple[float, float]]
"""(step, value), by rising step."""
STATE_FILE = "trainer_state.json"
SCORES = ("eval*/scores.json", "eval/step-*/scores.json")
"""Files of `longctx eval`, and of evaluations during the training."""
SHOWN = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second")
MEMORY = "peak_memory_bytes"
CONTEXT = "eval_context/"
"""Begins the names of what tasks over a long context give, as `eval_context/passkey/65536`."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything that a page shows of a run."""

    folder: Path
    series: Mapping[str, Points]
    """Finite values of each metric that is shown."""
    lengths: Sequence[tuple[int, int]]
    """(first step, tokens of its rows) of each stage of a run whose rows change their length."""
    settings: Mapping[str, Any]
    start: Mapping[str, float]
    """Seconds of each stage of the last start, as far as it is known."""
    decided: Sequence[Sequence[str]]
    """(what, value, why) of `longctx patch`."""
    planned_bytes: float | None
    """The memory of a GPU that was predicted."""
    state: str
    """How far the run is, in a sentence."""
    notes: Sequence[str]
    final: Path | None
    """The trained model, once it is saved."""
    scores: Path | None
    """The newest file of `longctx eval`."""


def read_run(run: Path) -> RunData:
    """Read a run folder or an output. Raises ValueError where `run` is neither."""
    asked = read_yaml(file) if (file := settings_file_of(run)) else {}
    named = asked.get("output") or asked.get("output_dir") or run
    places = [run, run / "training", Path(str(named))]
    names = (METRICS_FILE, STATE_FILE, f"checkpoint-*/{STATE_FILE}", "settings.json")
    output = next((p for p in places if any(any(p.glob(name)) for name in names)), None)
    plan = _json(run / PLAN_FILE) or (_json(output.parent / PLAN_FILE) if output else {})
    if output is None and not (asked or plan):
        raise ValueError(
            f"{run}: no {METRICS_FILE}, {STATE_FILE} or {SETTINGS_FILES[0]} in it. Give a run "
            "folder of `longctx patch`, or the output folder of a run."
        )
    output = output or run / "training"
    sources = [path for name in names[:3] for path in output.glob(name)]
    states = [_json(path) for path in sources if path.name == STATE_FILE]
    trainer = max(states, key=lambda state: state.get("global_step", 0), default={})
    metrics = output / METRICS_FILE
    lines, broken = whole_lines(metrics) if metrics.is_file() else ([], "")
    series, odd = _series([*lines, *trainer.get("log_history", ())])
    recorded = _json(output / "settings.json").get("settings", {})
    settings = recorded or asked or _json(output / "longctx.json").get("config", {})
    if "full" in settings:  # neither `lora` nor `full` means an adapter
        settings = {**settings, "lora": not settings["full"]}
    final = next((p for p in (output / "final", output) if _has_weights(p)), None)
    total = trainer.get("max_steps") or settings.get("max_steps")
    return RunData(
        folder=run,
        series=series,
        lengths=_lengths(lines),
        settings=settings,
        start=_json(output / START_FILE).get("seconds", {}),
        decided=plan.get("decided", ()),
        planned_bytes=plan.get("memory_bytes"),
        state=_state(series, total, final, output, sources),
        notes=[*filter(None, [broken, _changed(asked, recorded)]), *odd, *_flights(output)],
        final=final,
        scores=max(
            (path for place in (run, output) for name in SCORES for path in place.glob(name)),
            key=lambda path: path.stat().st_mtime,
            default=None,
        ),
    )


def _series(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Points], list[str]]:
    """Each metric's values by step, and what to say of values that can't be drawn."""
    lines = [*lines]
    context = {name: None for line in lines for name in line if name.startswith(CONTEXT)}
    found: dict[str, dict[float, float]] = {name: {} for name in (*SHOWN, MEMORY, *context)}
    odd, slow = [], dict[int, str]()
    for line in lines:
        step = line.get("step")
        if "skipped" in line:
            odd.append(f"Step {step} was skipped: {line['skipped']}.")
        if "slow_ranks" in line and isinstance(step, int):
            slow[step] = line["slow_ranks"]
        for name in found:
            value = line.get(name)
            if not isinstance(step, int):
                continue
            if isinstance(value, int | float) and math.isfinite(value):
                found[name][step] = value
            elif value is not None:
                odd.append(f"{name} of step {step} is {value}, which is not drawn.")
            elif name in line.get("non_finite", {}):
                odd.append(f"{name} of step {step} is {line['non_finite'][name]}, not drawn.")
    if slow:
        first, last = min(slow), max(slow)
        odd.append(f"Seen {len(slow)} times, in steps {first} to {last}: {slow[last]}.")
    return {name: sorted(points.items()) for name, points in found.items() if points}, odd


def _lengths(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Returns where rows of each length begin; nothing where all are alike."""
    found = list[tuple[int, int]]()
    for line in lines:
        step, seq_len = line.get("step"), line.get("seq_len")
        if not (isinstance(step, int) and isinstance(seq_len, int)):
            continue
        if not found or found[-1][1] != seq_len:
            found.append((step, seq_len))
    return found if len(found) > 1 else []


def _state(
    series: Mapping[str, Points],
    total: Any,
    final: Path | None,
    output: Path,
    sources: Sequence[Path],
) -> str:
    last = int(max((points[-1][0] for points in series.values()), default=0))
    of = f" of {total}" if isinstance(total, int) and total > 0 else ""
    from longctx_patch.checkpoints.lock import job_of  # imports torch

    job, is_held = job_of(output)
    if is_held:
        return f"Goes on: step {last}{of}; {job or 'another process'} writes there."
    if failure := _json(output / FAILURE_FILE):
        return (
            f"Failed after step {last}{of}: {failure.get('error')} (rank {failure.get('rank')}, "
            f"{failure.get('time')})."
        )
    if final:
        return f"Finished: {last} steps, saved to {final}."
    if job:
        return (
            f"Interrupted after step {last}{of}: its processes were ended without a word, as by "
            "SIGKILL or a machine that stopped. `--resume` goes on."
        )
    if not last:
        return f"No step yet in {output}."
    written = max(path.stat().st_mtime for path in sources)
    when = datetime.fromtimestamp(written).astimezone().isoformat(" ", "seconds")
    return f"Not finished: step {last}{of}, last written at {when}; it goes on, or was interrupted."


def _changed(asked: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
    """Lists what the last start changed of the run folder by flags, such as other degrees."""
    changed = [
        f"{name} {recorded[name]} (was {value})"
        for name, value in asked.items()
        if name in recorded and name not in ("resume", "allow_change")
        if value not in ("auto", recorded[name]) and type(value) is type(recorded[name])
    ]
    if not changed:
        return ""
    return f"The last start changed what `longctx patch` had decided: {', '.join(changed)}."


def _flights(output: Path) -> list[str]:
    """Returns what ranks of a job that hung have left: where each was."""
    from longctx_patch.checkpoints.series import FLIGHT  # with torch, which takes seconds

    records = [_json(path) for path in sorted((output / FLIGHT).glob("rank_*.json"))]
    return [
        f"flight record of rank {record.get('rank')}: {record.get('reason')}"
        for record in records
        if record
    ]


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or (folder / "adapter_config.json").is_file()


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, or being written just now
        return {}
    return content if isinstance(content, dict) else {}
