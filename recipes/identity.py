"""Compares what makes a run one run: a resumed one must have the same, or say what it changes.

A run that has ended and is started again is the same, a longer one, or another one, which is
refused: its numbers would be believed to be those in the output.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from longctx_patch.checkpoints.fingerprint import (
    RUN_FILE,
    Change,
    Fingerprint,
    changes,
    config_fields,
    plain,
    problems,
    read_run,
    samples_of,
    tokenizer_digest,
)
from longctx_patch.checkpoints.output_folder import Output
from longctx_patch.families.load_config import is_bare_config
from longctx_patch.health.agreement import launch_settings, versions
from longctx_patch.recipes.data.sources import parts_of
from longctx_patch.recipes.run_record import WEIGHT_FILES, ended_record
from longctx_patch.recipes.settings import PARALLELISM, ModelSettings
from longctx_patch.rules.together import of_all_ranks, own_rank, refuse_together

# Settings that may differ between a run and its resumption without changing any number.
FREE = {
    *("text", "data", "output", "resume", "allow_change"),
    *("save_every", "keep_last", "keep_every"),
    *("eval_data", "eval_steps", "max_eval_samples"),  # what is evaluated changes no weight
    *("eval_context_steps", "eval_context_tasks", "eval_context_lengths", "eval_context_samples"),
    "num_train_epochs",  # max_steps says it
    *("model", "tokenizer", "chat_template", "text_field"),  # what they lead to is compared
    "allow_dropped",  # the rows say what it has led to
    *("one_document_per_row", "pack", "mixture"),  # the digest of the rows says what they led to
    "fused_layers",  # changes rounding only
    *(
        "skip_rehearsal",
        "push_to_hub",
        "hub_private",
        "load_sharded",
        "save_in_background",
        "library_warnings",
    ),
    *("start_timeout", "step_timeout", "save_timeout"),
    *("skip_bad_steps", "sentinel_every"),  # good steps are what they are
}
PLACES = {"model", "tokenizer", "chat_template", "text", "data", "eval_data", "output"}
WORLD = {*PARALLELISM} - FREE - {"shifted_group"}  # tokens see others with it
ROWS = {"batch_size", "gradient_accumulation_steps"}


def fingerprint(
    settings: ModelSettings,
    *,
    config: Any,
    tokenizer: Any,
    data: Mapping[str, Any],
    sources: Sequence[str],
    processes: int,
    unused: Collection[str] = ("python", "trl"),
) -> dict[str, Any]:
    """Returns what a resumed run must share with the run that it continues, and that run's world.

    Args:
        config: of the model, as it is trained.
        data: what says which rows a step has.
        sources: of the data, whose files are named where the rows are others.
        unused: packages whose versions change nothing here.

    Files are read by process 0 alone; the others have none in their fingerprints.
    """
    values = dataclasses.asdict(settings)
    is_main = own_rank() == 0
    return plain(
        {
            "exact": {k: v for k, v in values.items() if k not in FREE | WORLD | ROWS} | dict(data),
            "config": config_fields(config),
            "weights": samples_of(weight_files(settings.model)) if is_main else {},
            "tokenizer": tokenizer_digest(tokenizer),
            "versions": {name: v for name, v in versions().items() if name not in unused},
            "files": samples_of(data_files(sources)) if is_main else {},
            "world": {
                "processes": processes,
                **{key: values[key] for key in sorted(WORLD | ROWS) if key in values},
            },
        }
    )


def with_weights(run: dict[str, Any], model: str) -> dict[str, Any]:
    """A fingerprint once the model is loaded, by which its files have come to this machine."""
    found = run["weights"] or own_rank() != 0
    return run if found else run | {"weights": samples_of(weight_files(model))}


def check_fingerprint(checkpoint: Path | None, now: Fingerprint, settings: Any) -> None:
    """Refuse to go on from a checkpoint where the numbers would differ from those of one run.

    Collective; raises ValueError on all processes. Without a checkpoint there is nothing to differ.
    """
    found: list[str] = []
    if own_rank() == 0 and checkpoint is not None:
        run, allowed = read_run(checkpoint), settings.allow_change
        had = defaults_of(type(settings))
        found = [*problems(checkpoint, run["fingerprint"], now, allowed=allowed, defaults=had)]
        done, most = run["step"], now["exact"]["max_steps"]
        if 0 < most < done:
            found.append(
                f"resume: {checkpoint} has {done} steps, and max_steps={most}: no step can be "
                f"taken back. Give {done} or more, or a new output."
            )
    refuse_together(found)


def is_over(output: Output, now: Fingerprint, settings: Any, length: Mapping[str, object]) -> bool:
    """Says whether the run that is asked for has ended in the output; every process calls this.

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
    """Returns what another run has. Versions have no part in it, as nothing is trained any more."""
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


def facts_of(settings: Any) -> dict[str, Any]:
    """Returns what all ranks must be given alike, with the versions that they run. Where things lie
    may differ between machines; what lies there is compared later."""
    values = dataclasses.asdict(settings)
    kept = {name: value for name, value in values.items() if name not in PLACES}
    return {"settings": kept, "versions": versions()} | launch_settings()


def defaults_of(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass's fields."""
    fields = dataclasses.fields(kind)
    made = {f.name: f.default_factory() for f in fields if callable(f.default_factory)}
    return made | {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def weight_files(model: str) -> list[Path]:
    """The files with a model's weights, of a folder or of the hub's cache; none for random ones."""
    if is_bare_config(model):
        return []
    folder = Path(model).expanduser()
    if not folder.is_dir():
        try:
            patterns = [*WEIGHT_FILES]
            found = snapshot_download(model, allow_patterns=patterns, local_files_only=True)
        except (LocalEntryNotFoundError, OSError, ValueError):
            return []
        folder = Path(found)
    return [path for pattern in WEIGHT_FILES for path in folder.glob(pattern)]


def base_problems(adapter: Path, files: Iterable[Path], otherwise: str) -> list[str]:
    """Says what is wrong where samples of the base's files differ from those of the adapter's run.
    An adapter that no recipe has written says nothing of them. `otherwise`: what else may be
    done."""
    runs = [folder for folder in (adapter, adapter.parent) if (folder / RUN_FILE).is_file()]
    then = read_run(runs[0])["fingerprint"].get("weights", {}) if runs else {}
    there = list(files) if then else []
    now = samples_of(there)
    return [
        f"base {str(there[0].parent)!r} is not the one that the adapter was trained over: {name} "
        f"is {now[name]}, and was {then.get(name, 'not there')}. Bring that model back, or "
        f"{otherwise}"
        for name in sorted(now)
        if now[name] != then.get(name)
    ]


def data_files(sources: Sequence[str]) -> set[Path]:
    """The files of this machine that sources of data are read from."""
    paths = {Path(part.path) for source in sources for part in parts_of(source)}
    saved = (path for folder in paths if folder.is_dir() for path in folder.rglob("*.arrow"))
    return {path for path in (*paths, *saved) if path.is_file()}
