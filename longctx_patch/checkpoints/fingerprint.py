"""Compares a run with the one that it goes on from: what differs is refused, or allowed by name.

A fingerprint is JSON: `exact` has settings by name, `config`, `weights` and `versions` have values
by name, `tokenizer` a digest, `world` how ranks share rows, and `files` samples of what `rows` were
made of.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from longctx_patch.rules.names import did_you_mean

NAMED = ("config", "weights", "versions", "files")
"""Sections with values by name."""
SECTIONS = (*NAMED, "tokenizer", "world")
HEADER_LIMIT = 100 << 20
"""Bytes: a longer header is none, as safetensors itself has it."""
NUM_SAMPLES = 4
UNKNOWN_REVISION = "a revision that the hub did not tell"
HUB_TIMEOUT_S = 20.0
SAMPLE_BYTES = 1 << 20

RUN_FILE = "run.json"
"""A checkpoint's file with the fingerprint of its run."""

Fingerprint = Mapping[str, Any]


def write_run(folder: Path, step: int, run: Fingerprint) -> None:
    """Write `run.json`: the step, and the run's fingerprint."""
    content = json.dumps({"step": step, "fingerprint": run}, indent=2, allow_nan=False)
    (folder / RUN_FILE).write_text(content, encoding="utf-8")


def read_run(folder: Path) -> dict[str, Any]:
    """Returns what `write_run` has written."""
    found: dict[str, Any] = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class Change:
    """A value that is another one than before."""

    name: str
    """The name of a setting, or `SECTION.NAME`."""
    then: Any
    now: Any

    @property
    def flag_name(self) -> str:
        """Returns what allows it. Files have many names, so their section is allowed whole."""
        section = self.name.split(".")[0]
        return section if section in ("weights", "files") else self.name

    def is_allowed(self, names: Collection[str]) -> bool:
        return self.name in names or self.name.split(".")[0] in names


def plain(fingerprint: Fingerprint) -> dict[str, Any]:
    """A fingerprint as it is read back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(fingerprint, default=str))
    return found


def changes(
    then: Fingerprint, now: Fingerprint, *, defaults: Mapping[str, Any]
) -> Iterator[Change]:
    """Yield what differs in a way that changes numbers, or may.

    Args:
        defaults: of settings. Where the version that began the run had no such setting, it ran with
            the default.
    """
    exact = now["exact"]
    schedule = str(exact.get("scheduler") or exact.get("lr_scheduler_type"))
    free = {"max_steps", "num_train_epochs"} if schedule.startswith("constant") else set()
    had = plain(defaults) | then["exact"]
    for name, value in exact.items():
        if name not in free and had.get(name) != value:
            yield Change(name, had.get(name), value)
    same_versions = then.get("versions") == now["versions"]
    for section in ("config", "weights", "versions"):
        before, after = then.get(section, {}), now[section]
        # Another version of a library may know more fields than the one before.
        keys = before.keys() | after.keys()
        if section == "config" and not same_versions:
            keys = before.keys() & after.keys()
        for key in sorted(keys):
            if before.get(key) != after.get(key):
                yield Change(f"{section}.{key}", before.get(key), after.get(key))
    if then.get("tokenizer") != now["tokenizer"]:
        yield Change("tokenizer", then.get("tokenizer"), now["tokenizer"])
    yield from _file_changes(then, now)


def _file_changes(then: Fingerprint, now: Fingerprint) -> Iterator[Change]:
    """Files of data with another sample, where the rows don't tell: over TRL a table is known by
    some of its rows, so that files of one name are compared too, and a stream by its files alone.
    """
    streams = now["exact"].get("streaming")
    if streams is None or then["exact"].get("rows") != now["exact"].get("rows"):
        return
    was, are = then.get("files", {}), now["files"]
    for name in sorted(was.keys() | are.keys() if streams else was.keys() & are.keys()):
        if was.get(name) != are.get(name) or are.get(name) == UNKNOWN_REVISION:
            yield Change(f"files.{name}", was.get(name), are.get(name))


def problems(
    checkpoint: Path,
    then: Fingerprint,
    now: Fingerprint,
    *,
    allowed: Collection[str],
    defaults: Mapping[str, Any],
) -> Iterator[str]:
    """Yield why the run `now` is not that of the checkpoint, and which flag allows it."""
    now = plain(now)
    yield from _unknown(allowed, now)
    found = [each for each in changes(then, now, defaults=defaults) if not each.is_allowed(allowed)]
    if found:
        listed = "\n  ".join(f"{e.name} is {e.now!r}, the run has {e.then!r}" for e in found)
        names = " ".join(sorted({each.flag_name for each in found}))
        epochs = " (--num-train-epochs gives max_steps too)" if "max_steps" in names else ""
        yield (
            f"resume: it differs from the run at {checkpoint}, so the numbers would not be those "
            f"of one run:\n  {listed}\n{_other_files(then, now)}Use what the run had{epochs}, "
            f"start a new one, or go on all the same with --allow-change {names}."
        )
    # Only settings that both versions count as the world are compared.
    both = sorted(then["world"].keys() & now["world"].keys())
    was, is_now = ({key: run["world"][key] for key in both} for run in (then, now))
    if now["exact"].get("lora_dropout", 0) > 0 and was != is_now and "world" not in allowed:
        yield (
            f"resume: the world was {was} and is {is_now}. With lora_dropout="
            f"{now['exact']['lora_dropout']} each process has random numbers of its own, which "
            "another number of processes can't continue. Use the old world, start a new run, or "
            "go on with other random numbers: --allow-change world."
        )


def _unknown(allowed: Collection[str], now: Fingerprint) -> Iterator[str]:
    inner = {f"{section}.{key}" for section in NAMED for key in now[section]}
    known = [*now["exact"], *SECTIONS, *inner]
    for name in allowed:
        # Of a file that is gone, only the checkpoint knows the name.
        if name not in known and name.split(".")[0] not in NAMED:
            yield f"allow_change: {name!r} is nothing that is compared.{did_you_mean(name, known)}"


def _other_files(then: Fingerprint, now: Fingerprint) -> str:
    """Returns which files of data are other ones, where the rows are."""
    was, are = then.get("files", {}), now.get("files", {})
    names = [name for name in sorted(was.keys() | are.keys()) if was.get(name) != are.get(name)]
    if then["exact"].get("rows") == now["exact"].get("rows") or not names:
        return ""
    return "".join(f"  data {n}: {are.get(n, 'gone')}, was {was.get(n, 'none')}\n" for n in names)


# ---- What a run reads, in few bytes: enough to tell that a file is another one, at any size ----


def sample_of(path: Path) -> str:
    """A file's size and a digest of a sample: equal for equal files, and in all likelihood for
    those alone.

    A sample is the whole header of a safetensors file, which names dtypes and shapes, and 1 MiB at
    each of four fixed places, the first and the last byte among them.
    """
    size = path.stat().st_size
    content = hashlib.sha256()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            content.update(file.read(min(HEADER_LIMIT, 8 + int.from_bytes(file.read(8), "little"))))
        last = max(0, size - SAMPLE_BYTES)
        for number in range(NUM_SAMPLES):
            file.seek(last * number // (NUM_SAMPLES - 1))
            content.update(file.read(SAMPLE_BYTES))
    return f"{size:,} bytes, sample {content.hexdigest()[:16]}"


def samples_of(paths: Iterable[Path]) -> dict[str, str]:
    """The samples of files by their names; a file that was moved is the same. Of files in several
    folders that share a name, all samples."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        found.setdefault(path.name, []).append(sample_of(path))
    return {name: " and ".join(samples) for name, samples in found.items()}


def revision_of(dataset: str) -> str:
    """Returns which commit of a dataset on the hub is read."""
    try:
        found = huggingface_hub.HfApi().dataset_info(dataset, timeout=HUB_TIMEOUT_S).sha
    except Exception:  # of the network, in types of several libraries
        found = None
    return f"revision {found}" if found else UNKNOWN_REVISION


def tokenizer_digest(tokenizer: Any) -> str:
    """Equal for tokenizers that give equal tokens, specials and chats."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    said = repr((words, tokenizer.chat_template, sorted(tokenizer.special_tokens_map.items())))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def config_fields(config: Any) -> dict[str, Any]:
    """A model's config as it is trained, without what names its place and its library."""
    fields = config.to_dict()
    return {n: v for n, v in fields.items() if n[0] != "_" and n != "transformers_version"}
