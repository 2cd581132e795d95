"""README.md of a trained model: what was trained on what, how it ended, how to load and merge it.

An adapter whose RoPE is not its base's also gets a mark in `adapter_config.json`. Whatever loads an
adapter by its name alone (peft's AutoPeftModelForCausalLM, say) takes the base's own config, and
nothing in an adapter's folder can change that; but peft prints a name that it does not know, so the
mark is read on the screen at that moment.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedConfig

from longctx_patch import __version__
from longctx_patch.families.load_config import load_model_config
from longctx_patch.families.rope_facts import describe_rope, full_attention_rope
from longctx_patch.families.text_part import auto_class_name
from longctx_patch.recipes.models import is_bare_config
from longctx_patch.recipes.settings import ModelSettings, parallelism_of

MARK = "WARNING_load_the_base_with_config_json_of_this_folder_as_README_md_says"
ADAPTER_FILE = "adapter_config.json"
PACKAGES = ("torch", "transformers", "accelerate", "peft")
NUMBERS = ("step", "loss", "eval_loss")
TEMPLATE = """\
---
{head}---
# {title}

| | |
|---|---|
{rows}

## Load it

{loading}"""
ADAPTER = """\
`config.json` here is the base model's with the RoPE that the adapter was trained for, and a context
of {length} tokens. Load them together:

    from peft import PeftModel
    from transformers import AutoConfig, {loader}, set_seed

    config = AutoConfig.from_pretrained({place})
    {how}
    model = PeftModel.from_pretrained(model, {place})
"""
TRAP = """
**Not with `AutoPeftModelForCausalLM`, nor over a base that a server loaded by itself:** these take
the base's own RoPE, without a word, and positions are not those of the training. peft warns of
`{mark}`, here in adapter_config.json, whichever way it loads the adapter.
"""
SHIFTED = "trained in shifted groups of {} tokens (LongLoRA); full in use"
MERGE = """
## Merge it

```
{merge}
```

writes the base's weights with the adapter in them, for vLLM and plain transformers.
"""
WHOLE = """\
    from transformers import {loader}, AutoTokenizer

    model = {loader}.from_pretrained({place})
    tokenizer = AutoTokenizer.from_pretrained({place})
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """Holds what a model card says of a run; data are named, never quoted."""

    base: str
    """Hub name, folder, or config.json of random weights."""
    rows: Sequence[tuple[str, str]]
    """(what, value) of each line of its table."""
    is_adapter: bool
    seed: int
    """The seed of random weights."""
    place: str = ""
    """Where readers load it from, if not the folder itself."""


def card_of(
    settings: ModelSettings,
    config: PreTrainedConfig,
    *,
    data: Sequence[str],
    training: Mapping[str, str],
    numbers: Mapping[str, Any],
    seed: int,
    place: str = "",
) -> Card:
    """The card of a run that trained on `data`; `training` are lines about how, and `numbers` the
    last ones of its metrics."""
    trained = "every weight"
    if settings.uses_lora:
        trained = f"LoRA adapter of rank {settings.lora_rank}, alpha {settings.lora_alpha:g}"
        trained += f"; as a whole: {', '.join(settings.also_train)}" * bool(settings.also_train)
    trained += ", over weights in 4 bits (NF4)" if settings.load_in_4bit else ""
    degrees = parallelism_of(settings)
    rows = [
        ("base model", _name(settings.model)),
        ("trained", trained),
        ("data", ", ".join(map(_name, data))),
        ("rows", f"{settings.seq_len} tokens"),
        ("RoPE", _rope(config)),
        ("degrees", f"ulysses {degrees.ulysses_degree} x ring {degrees.ring_degree}"),
        *([("attention", SHIFTED.format(group))] if (group := degrees.shifted_group) else []),
        *training.items(),
        *((name, f"{numbers[name]:.6g}") for name in NUMBERS if numbers.get(name) is not None),
        ("versions", ", ".join([f"longctx-patch {__version__}", *map(_versioned, PACKAGES)])),
    ]
    return Card(
        base=settings.model, rows=rows, is_adapter=settings.uses_lora, seed=seed, place=place
    )


def _versioned(package: str) -> str:
    return f"{package} {version(package)}"


def write_card(folder: Path, card: Card, config: PreTrainedConfig, final: Path) -> None:
    """Write README.md of a model that was saved to `folder`; `config` is that of the model.

    `final`: the place that the folder will have.
    """
    head: dict[str, Any] = {"library_name": "peft" if card.is_adapter else "transformers"}
    if not (is_bare_config(card.base) or Path(card.base).exists()):
        head["base_model"] = card.base
    head |= {"pipeline_tag": "text-generation", "tags": ["long-context", "longctx-patch"]}
    place = card.place or str(final.resolve())
    loading = WHOLE.format(
        place=json.dumps(place, ensure_ascii=False), loader=auto_class_name(config)
    )
    if card.is_adapter:
        loading = how_to_load(config, card.base, place, card.seed, warns=is_marked(folder))
        merge = f"hf download {place} --local-dir adapter\nlongctx merge adapter"
        merge = merge if card.place else shlex.join(["longctx", "merge", place])
        loading += "" if is_bare_config(card.base) else MERGE.format(merge=merge)
    text = TEMPLATE.format(
        head=yaml.safe_dump(head, sort_keys=False),
        title=f"{cell(_name(card.base))}, trained on long rows",
        rows="\n".join(f"| {what} | {cell(value)} |" for what, value in card.rows),
        loading=loading,
    )
    # Data may lie under a path that is no UTF-8.
    (folder / "README.md").write_text(text, encoding="utf-8", errors="backslashreplace")


def how_to_load(config: PreTrainedConfig, base: str, place: str, seed: int, *, warns: bool) -> str:
    """The lines that load an adapter over its base with the right RoPE."""
    loader = auto_class_name(config)
    if is_bare_config(base):
        how = f"set_seed({seed})  # the base model has the random weights of this seed\n"
        how += f"    model = {loader}.from_config(config)"
    else:
        base = str(Path(base).resolve()) if Path(base).is_dir() else base
        place_of_base = json.dumps(base, ensure_ascii=False)
        how = f"model = {loader}.from_pretrained({place_of_base}, config=config)"
    text = ADAPTER.format(
        length=config.max_position_embeddings,
        place=json.dumps(place, ensure_ascii=False),
        how=how,
        loader=loader,
    )
    return text + (TRAP.format(mark=MARK) if warns else "")


def mark_adapter(folder: Path, config: PreTrainedConfig, base: str) -> bool:
    """Mark an adapter that must not be loaded over its base's own config; returns whether it is."""
    found = _changes_rope(config, base)
    if found:
        path = folder / ADAPTER_FILE
        content = json.loads(path.read_text(encoding="utf-8")) | {MARK: True}
        path.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
    return found


def is_marked(folder: Path) -> bool:
    """Says whether an adapter in `folder` must not be loaded over its base's own config."""
    path = folder / ADAPTER_FILE
    return path.is_file() and MARK in json.loads(path.read_text(encoding="utf-8"))


def _changes_rope(config: PreTrainedConfig, base: str) -> bool:
    """Says whether positions differ from the published base's; yes where that can't be read now."""
    try:
        published = load_model_config(base)
    except ValueError:
        return True
    names = ("rope_parameters", "max_position_embeddings")
    return any(getattr(config, name, None) != getattr(published, name, None) for name in names)


def _rope(config: PreTrainedConfig) -> str:
    length = int(getattr(config, "max_position_embeddings", 0))
    try:
        layer_type, rope = full_attention_rope(config)
    except ValueError:
        return f"none in full attention; context of {length} tokens"
    base = f"{describe_rope(rope, length)}, rope_theta {rope['rope_theta']:g}"
    alone = " in full attention" if layer_type else ""
    return f"{base}{alone}; context of {length} tokens"


def _name(source: str) -> str:
    """A hub name as it is; of a local path the last part, without the folders around it."""
    path = Path(source)
    if path.name == "config.json":
        return f"{path.absolute().parent.name}/config.json"
    return path.name if path.is_absolute() or path.exists() else source


def cell(value: str) -> str:
    """A table's cell or a title: one line, in which a name can't open another cell or a tag."""
    return " ".join(value.split()).replace("|", r"\|").replace("<", "&lt;")
