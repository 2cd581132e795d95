"""The model that is evaluated: of a run, of an output, an adapter over its base, or as published.

It is found from files alone; its weights are read by the processes that evaluate it.
"""

# setting() returns a dataclasses.field, which ruff cannot see
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from longctx_patch.checkpoints.series import checkpoints_of
from longctx_patch.families.load_config import is_bare_config, load_model_config
from longctx_patch.families.rope_facts import reachable_length
from longctx_patch.families.text_part import auto_class
from longctx_patch.recipes import models
from longctx_patch.recipes.identity import base_problems, weight_files
from longctx_patch.recipes.model_card import ADAPTER_FILE, MARK
from longctx_patch.recipes.models import TOKENIZER_FILES
from longctx_patch.recipes.run_record import (
    NO_MODEL,
    RECORD_FILE,
    WEIGHT_FILES,
    ended_record,
    outputs_of,
    settings_file_of,
)
from longctx_patch.recipes.settings import ModelSettings, Parallelism, parallelism_in, setting
from longctx_patch.recipes.yaml_file import read_yaml
from longctx_patch.rules.together import refuse_together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Parallelism, ModelSettings):
    """A model to evaluate."""

    label: str = setting("its name in the results", default="")
    adapter: str = setting("folder of an adapter over `model`", default="")
    base: str = setting("what it was trained from", default="")
    degrees: tuple[int, int] | None = setting("Ulysses and ring of its run", default=None)
    is_run: bool = setting("whether it is that of a run folder or of an output", default=False)

    def with_(self, **changes: Any) -> "Evaluated":
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def is_trained(self) -> bool:
        """Says whether its folder says the RoPE that it was trained with."""
        return has_config(self.adapter) if self.adapter else bool(self.base)


def has_config(adapter: str) -> bool:
    """Says whether an adapter's folder has a config.json, as those have that were trained here."""
    return (Path(adapter) / "config.json").is_file()


def find(target: str) -> Evaluated:
    """The model that a run folder, an output, an adapter's folder or a model's name stands for.

    Raises ValueError where nothing in it can be evaluated.
    """
    folder = Path(target).expanduser()
    if is_bare_config(target):
        raise ValueError(
            f"{target} is a config without weights, so there is nothing to evaluate: give a folder "
            "or a hub name with weights, or the run folder of a model that was trained from it."
        )
    if outputs := outputs_of(folder):
        return _of_run(folder, outputs)
    if (folder / ADAPTER_FILE).is_file():
        return _with_adapter(folder, label=_name_of(folder.resolve()))
    _require_weights(target)
    where = str(folder.resolve()) if folder.is_dir() else target
    return Evaluated(model=where, label=_name_of(Path(where)), full=True)


def _name_of(model: Path) -> str:
    """The folder's name, or that of the run in whose output it is, `RUN/training/final`."""
    run = model.parent.parent.name if model.parent.name == "training" else ""
    return run or model.name  # a hub name has no folder before its owner


def _of_run(folder: Path, outputs: Sequence[Path]) -> Evaluated:
    found = next((place for output in outputs if (place := _newest(output))), None)
    if found is None:
        raise ValueError(NO_MODEL.format(folder))
    settings = settings_file_of(folder)
    if settings:
        asked = read_yaml(settings)
    else:
        asked = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))["settings"]
    run = parallelism_in(settings)[0] if settings else None
    degrees = (run.ulysses_degree, run.ring_degree) if run else None
    step = "" if found.name == "final" else f", {found.name}"
    label = f"{folder.resolve().name}{step}"
    if (found / ADAPTER_FILE).is_file():
        adapter = _with_adapter(found, label=label)
        return adapter.with_(degrees=degrees, is_run=True)
    return Evaluated(
        model=str(found.resolve()),
        label=label,
        base=str(asked.get("model", "")),
        degrees=degrees,
        is_run=True,
        full=True,
    )


def _newest(output: Path) -> Path | None:
    """The folder with the newest trained model: final/ of a run that has ended, else a
    checkpoint's, else final/."""
    saved = [each.path for each in reversed(checkpoints_of(output).complete())]
    final = output / "final"
    places = [final, *saved] if ended_record(output) else [*saved, final]
    return next((place for place in places if _has_weights(place)), None)


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in (*WEIGHT_FILES, ADAPTER_FILE))


def _require_weights(model: str) -> None:
    """Refuse a local model's folder without weights: training alone begins from random ones."""
    file = Path(models.weights_or_config(model))
    if str(file) != model and file.is_file():
        raise ValueError(
            f"model folder {model!r} has no weights ({', '.join(WEIGHT_FILES)}), and `longctx "
            "eval` evaluates trained ones. Bring them there, or give another folder, a hub name, "
            "or the run folder of a model that was trained."
        )


def _with_adapter(folder: Path, *, label: str) -> Evaluated:
    content = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
    base = content.get("base_model_name_or_path") or ""
    is_gone = Path(base).is_absolute() and not Path(base).exists()
    if not base or is_gone or is_bare_config(base):
        what = f"has {base}, a config without weights, as its base"
        what = f"has {base} as its base, which is not there" if is_gone else what
        raise ValueError(
            f"the adapter in {folder} {what if base else 'names no base'}: it can't be evaluated. "
            "Give an adapter over a folder or a hub name with weights; where its base has moved, "
            f"say so in {ADAPTER_FILE} (base_model_name_or_path)."
        )
    _require_weights(base)
    refuse_together(_problems_of_base(folder, base))
    own = any((folder / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = str(folder.resolve()) if own else ""
    place = str(folder.resolve())
    return Evaluated(
        model=base, adapter=place, base=base, label=label, tokenizer=tokenizer, full=True
    )


def _problems_of_base(adapter: Path, base: str) -> list[str]:
    """Compares the files of a base that are on this machine with those of the adapter's run."""
    return base_problems(
        adapter,
        weight_files(base),
        f"evaluate it merged: longctx merge {adapter} --base {base}.",
    )


def base_of(tuned: Evaluated) -> Evaluated | None:
    """The model that a run began with, as it was published; None where it had random weights."""
    if not tuned.base or is_bare_config(tuned.base):
        return None
    if Path(tuned.base).is_absolute() and not Path(tuned.base).exists():
        raise ValueError(
            f"{tuned.label} was trained from {tuned.base}, which is not there. Evaluate it "
            "--alone, or beside the moved one: --beside FOLDER."
        )
    found = find(tuned.base)
    label = found.label if found.label != tuned.label else f"{found.label} (base)"
    # They were trained with one tokenizer, which a base may lack.
    tokenizer = tuned.tokenizer or tuned.model
    return found.with_(label=label, tokenizer=tokenizer)


def config_of(settings: Evaluated) -> PreTrainedConfig:
    """The model's config, with the RoPE that it was trained with or that was asked for.

    Raises ValueError for what can't be evaluated, before weights are read.
    """
    reach = None
    if settings.is_trained and not settings.allow_beyond_reach:
        reach = reach_of(settings)
    if reach is not None and reach < settings.seq_len:
        raise ValueError(
            f"{settings.seq_len} tokens, but {settings.label} was trained to reach {reach}. Give "
            f"--lengths up to {reach}; or --allow-beyond-reach, to see what it does beyond; or "
            "train it on, with `longctx patch --context`."
        )
    if not (settings.adapter and has_config(settings.adapter)):
        return models.load_config(settings)
    plain = settings.with_(rope="none", allow_beyond_reach=True)
    models.load_config(plain)  # refuses a base without weights or without a head
    config = load_model_config(settings.adapter)
    if hasattr(config, "quantization_config"):  # the adapter's base was rounded to 4 bits
        del config.quantization_config
    return config


def load(
    settings: Evaluated,
    config: PreTrainedConfig,
    device: torch.device,
    *,
    sharded: bool,
    say: Callable[[str], object],
) -> PreTrainedModel:
    """The model in `settings.dtype`, frozen and in evaluation mode. Collective."""
    model: Any = models.load_model(settings, config, device, sharded=sharded, say=say)
    if settings.adapter:
        from peft import PeftModel

        # A base may have come from the hub just now.
        refuse_together(_problems_of_base(Path(settings.adapter), settings.model))
        with warnings.catch_warnings():  # the config is the adapter's, as the mark asks
            known = rf"Unexpected keyword arguments \['{MARK}'\]"
            warnings.filterwarnings("ignore", message=known)
            model = PeftModel.from_pretrained(model, settings.adapter)
    model = model.requires_grad_(False).eval()
    found: PreTrainedModel = model if sharded else model.to(device)
    return found


def with_dtype(settings: Evaluated, config: PreTrainedConfig, *, on_cpu: bool) -> Evaluated:
    """The settings with `dtype: auto` resolved: float32 on the CPU, 16 bits on GPUs, of which the
    config's if it names one: their kernels for long rows know no others."""
    found = models.weights_dtype(config, frozen=True, on_cpu=on_cpu)
    found = "bfloat16" if found == "float32" and not on_cpu else found
    return settings if settings.dtype != "auto" else settings.with_(dtype=found)


def reach_of(settings: Evaluated) -> int | None:
    """The longest row that the model's RoPE reaches as it is; None: any."""
    plain = settings.with_(rope="none", allow_beyond_reach=True)
    return reachable_length(config_of(plain))


def notes_of(settings: Evaluated, config: PreTrainedConfig, longest: int) -> Iterator[str]:
    """Says what a reader of the scores has to know of the model. `longest`: tokens of a row."""
    yield f"weights in {settings.dtype}"
    if settings.base and is_bare_config(settings.base):
        yield "began with random weights, so no base stands beside it"
    reach = reachable_length(config)
    if reach is not None and reach < longest:
        yield f"reaches {reach:,} tokens, and is evaluated beyond without another RoPE"
    if not settings.adapter:
        return
    if not has_config(settings.adapter):
        asked = settings.rope != "none"
        yield "its folder has no config.json: " + ("RoPE as asked" if asked else "RoPE of its base")
    elif "quantization_config" in json.loads((Path(settings.adapter) / "config.json").read_text()):
        yield "trained over weights rounded to 4 bits, and evaluated over the ones that were not"


def num_bytes(settings: Evaluated, config: PreTrainedConfig, *, on_cpu: bool) -> int:
    """Returns what the model's weights take in the dtype in which they are evaluated."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    dtype = getattr(torch, with_dtype(settings, config, on_cpu=on_cpu).dtype)
    return int(sum(p.numel() for p in model.parameters()) * dtype.itemsize)
