"""Merge an adapter into its base's weights, one file of the base at a time.

Files, names and, unless asked otherwise, dtypes are those of the base checkpoint. Host memory holds
one of its files and a few copies of one module.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig

from longctx_patch.families.load_config import load_model_config
from longctx_patch.families.stored_tensors import (
    INDEX,
    StoredTensor,
    files_of_index,
    read_headers,
)
from longctx_patch.recipes.adapter import AdapterOverBase, load_adapter_config
from longctx_patch.recipes.exporting import write_config
from longctx_patch.recipes.identity import base_problems
from longctx_patch.recipes.model_card import ADAPTER_FILE
from longctx_patch.recipes.models import is_bare_config
from longctx_patch.recipes.run_record import require_new
from longctx_patch.rules.together import refuse_together

TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "additional_chat_templates/*"),
)
BASE_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Holds what was written."""

    folder: Path
    base: str
    config: PreTrainedConfig
    num_changed: int
    """Tensors that the adapter changed."""
    num_tensors: int
    is_from_4bit: bool
    """Whether the adapter was trained over the base's weights rounded to 4 bits."""


def find_adapter(run: Path) -> Path:
    """The adapter of a run folder, of its output, or `run` itself.

    Raises ValueError where there is none, and says what to do with a run that trained every weight.
    """
    places = [run, run / "final", run / "training" / "final"]
    for place in places:
        if (place / ADAPTER_FILE).is_file():
            return place
    for place in places:
        if (place / INDEX).is_file() or (place / "model.safetensors").is_file():
            raise ValueError(
                f"{place} holds a whole model (every weight was trained): there is nothing to "
                f'merge. It loads by itself: AutoModelForCausalLM.from_pretrained("{place}").'
            )
    raise ValueError(
        f"{run}: no adapter in it, nor in final/ or training/final/ ({ADAPTER_FILE}). A run that "
        "goes on has its newest one under checkpoint-N, with --save-every N."
    )


def merge(
    adapter_folder: Path, out: Path, *, base: str = "", dtype: torch.dtype | None = None
) -> Merged:
    """Write the merged model to the new folder `out`; transformers and vLLM load it.

    `base` is a hub name or a folder if not the one that the adapter names; `dtype` is that of all
    floating-point weights if not each tensor's own. Sums are made in float32 and rounded once.
    Raises ValueError, before anything is written, for what can't be merged, and for a base whose
    files are not those that the adapter was trained over, unless it is given.
    """
    require_new(out)
    adapter = load_adapter_config(adapter_folder)
    name = base or adapter.base_model_name_or_path or ""
    source = base_folder(name, None if base else adapter.revision)
    files = _weight_files(source)
    if not base:
        files_of_base = (source / file for file in {*files.values()})
        how = f"give its place with --base. (To merge into this one all the same: --base {source}.)"
        refuse_together(base_problems(adapter_folder, files_of_base, how))
    base_config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    if getattr(base_config, "quantization_config", None):
        raise ValueError(
            f"base {name!r} has quantised weights (quantization_config): merging would round again "
            "what was rounded. Give the model before quantisation, with --base."
        )
    own = (adapter_folder / "config.json").is_file()
    config = load_model_config(str(adapter_folder)) if own else base_config
    is_from_4bit = hasattr(config, "quantization_config")
    if is_from_4bit:
        del config.quantization_config
    paths = [str(source / file) for file in sorted({*files.values()})]
    tensors = read_headers(paths, others=True)
    over = AdapterOverBase(adapter_folder, adapter, config, tensors)
    owners = over.owners()
    _check_names(over.missing(), name, config)
    _check_space(out, files, source)

    out.mkdir(parents=True, exist_ok=True)
    try:
        sizes = _write_weights(over, owners, source, tensors, files, out, dtype)
        if (source / INDEX).is_file():
            content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
            (out / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")
        _copy_beside(adapter_folder, source, out)
        config.dtype = dtype or base_config.dtype or config.dtype
        write_config(config, out)  # last: without it, a folder left by a kill does not load
    except BaseException:
        for path in filter(Path.is_file, list(out.rglob("*"))):
            path.unlink()  # half a model is of no use, and would be in the way; `out` was empty
        raise
    return Merged(
        folder=out,
        base=name,
        config=config,
        num_changed=len(owners.keys() & files.keys()),
        num_tensors=len(files),
        is_from_4bit=is_from_4bit,
    )


def base_folder(name: str, revision: str | None) -> Path:
    """The folder with the base's files, from the hub where `name` is no local one."""
    if not name:
        raise ValueError(f"{ADAPTER_FILE} names no base model. Give it with --base.")
    if is_bare_config(name):
        raise ValueError(
            f"the base {name} is a bare config: its random weights are made again from the run's "
            "seed, and there is no checkpoint to merge into. README.md beside the adapter has the "
            "lines that load both; then call merge_and_unload() and save_pretrained()."
        )
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(BASE_FILES)))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"base {name!r} is no folder here, and could not be had from the hub "
            f"({str(error).splitlines()[0]}). Give a folder or a hub name with --base."
        ) from error


def _weight_files(source: Path) -> dict[str, str]:
    """The file that holds each tensor of the checkpoint."""
    if (source / INDEX).is_file():
        return files_of_index(source / INDEX)
    single = source / "model.safetensors"
    if not single.is_file():
        raise ValueError(
            f"base {source} has no safetensors ({single.name} or {INDEX}). Load it with "
            "transformers and save it once with save_pretrained, and name that folder by --base."
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single.name)


def _check_names(missing: list[str], base: str, config: PreTrainedConfig) -> None:
    tied = set() if not config.tie_word_embeddings else {"lm_head.weight"}
    if unknown := [name for name in missing if name not in tied]:
        raise ValueError(
            f"the adapter changes {unknown[0]} (and {len(unknown) - 1} more), which the checkpoint "
            f"of {base!r} does not hold. Load the adapter with peft and call merge_and_unload()."
        )


def _check_space(out: Path, files: dict[str, str], source: Path) -> None:
    needed = sum((source / name).stat().st_size for name in {*files.values()})
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"--out {out}: {needed / 2**30:.1f} GiB to write, {free / 2**30:.1f} free there. "
            "Give a folder on another disk."
        )


def _write_weights(
    over: AdapterOverBase,
    owners: dict[str, str],
    source: Path,
    tensors: dict[str, StoredTensor],
    files: dict[str, str],
    out: Path,
    dtype: torch.dtype | None,
) -> dict[str, int]:
    """Write each file of the base with its merged tensors; returns bytes by file."""
    pending: dict[str, torch.Tensor] = {}  # of modules whose tensors lie in several files
    sizes = {}
    for file_name in sorted({*files.values()}):
        written = {}
        with ExitStack() as stack:
            file = stack.enter_context(safe_open(source / file_name, framework="pt"))
            for name in file.keys():  # noqa: SIM118  # it is no dict
                if name in owners and name not in pending:
                    pending |= {
                        key: _rounded(key, merged, dtype or tensors[key].dtype)
                        for key, merged in over.merged(owners[name]).items()
                    }
                if name in pending:
                    written[name] = pending.pop(name)
                    continue
                value = file.get_tensor(name)
                wanted = dtype if dtype and value.is_floating_point() else value.dtype
                written[name] = _rounded(name, value, wanted)
            (out / file_name).parent.mkdir(parents=True, exist_ok=True)
            save_file(written, out / file_name, metadata={"format": "pt"})
        sizes[file_name] = sum(value.nbytes for value in written.values())
    return sizes


def _rounded(name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = value.to(dtype)
    if dtype == torch.float16 and not result.isfinite().all():
        raise ValueError(f"{name} has values beyond float16's range. Use --dtype bfloat16.")
    is_whole = result.untyped_storage().nbytes() == result.nbytes
    return result.contiguous() if is_whole else result.clone(memory_format=torch.contiguous_format)


def _copy_beside(adapter_folder: Path, source: Path, out: Path) -> None:
    """The tokenizer with its chat template, of the run if it saved one, and generation's config."""
    has_own = (adapter_folder / "tokenizer_config.json").is_file()
    for path in _matching(adapter_folder if has_own else source, TOKENIZER):
        target = out / path.relative_to(adapter_folder if has_own else source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    generation = "generation_config.json"
    for folder in (adapter_folder, source):
        if (folder / generation).is_file():
            shutil.copyfile(folder / generation, out / generation)
            return


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[Any]:
    for pattern in patterns:
        yield from (path for path in folder.glob(pattern) if path.is_file())
