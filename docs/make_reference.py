"""Write the generated pages of docs/reference: `python docs/make_reference.py`, or `make docs`.

The text is that of the code: docstrings, help of commands and settings, the table of families.
tests/docs asserts that the committed pages are what this script makes.
"""

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any, Literal, get_args, get_origin

import click

import longctx_patch
from longctx_patch import LongContextConfig, masks
from longctx_patch.cli.families import render_markdown
from longctx_patch.cli.main import main as longctx
from longctx_patch.kernels import available
from longctx_patch.plans.generators.table import PLANS
from longctx_patch.recipes.settings import SHORT_NAMES, Parallelism, Settings
from longctx_patch.recipes.trl_settings import TrlSettings

FOLDER = Path(__file__).parent / "reference"
MADE = "<!-- made by docs/make_reference.py: change the code, then run `make docs` -->"
NAMES = {
    "plan": ("auto", *PLANS),
    "backward_plan": ("auto", *PLANS),
    "kernel": ("auto", *available()),
}
MASKS = ("causal", "bidirectional", "prefix_lm", "block_sparse", "function_mask")
FAMILIES = """# Model families

A family is supported when its mixing of tokens goes through transformers' attention registry, or
through recurrences and short convolutions that run over chains
([recurrent layers](../explanation/recurrent-layers.md)), and the tests have compared it with the
unpatched model: the loss and every gradient, on 1 to 4 ranks, with its windows, softcap, sinks,
experts and recurrent layers. `longctx families` prints these tables, also as JSON. The
load-balancing loss of experts is that of all tokens of a batch, without padding; over the batches
and replicas of a step it is their mean by tokens.

- Heads of 512, which global layers of Gemma 4 have, are beyond every fused kernel of GPUs
  ([kernels](kernels.md)). Those layers compute in `torch_eager`, by chunks of 64 MiB of scores in
  float32: exact, in memory that grows with the length and not with its square, but many times
  slower. A warning says so when the first such layer runs.
- Read in bfloat16, DeepSeek-V3 and families with its router keep the router's weights in float32
  from transformers 5.24 on, and FSDP2 shards a layer's trained weights in one dtype: without mixed
  precision `accelerator.prepare` refuses them. Train all their weights in float32 (the recipes' own
  choice) or under `mixed_precision: bf16`, which makes trained weights float32, or a LoRA adapter.
- Layers of Zamba 2 that share weights are sharded together with the rest of the model under FSDP2,
  the others one by one.
- Phi-3.5-MoE draws experts at random in training, on ranks others than in one process. It is exact
  with `router_jitter_noise=0.0`, which the refusal of its published config asks for: then the two
  best experts are taken, each with a weight of 1 as in the published model where no other is within
  2 % of it, and its router has the gradient of its load-balancing loss alone."""


def pages() -> dict[str, str]:
    """Every generated page, by its file name."""
    families = f"{FAMILIES}\n\n{render_markdown()}"
    texts = {"api.md": api(), "cli.md": cli(), "config.md": config(), "families.md": [families]}
    return {name: "\n".join([MADE, *lines]).strip() + "\n" for name, lines in texts.items()}


def config() -> Iterator[str]:
    """The fields of LongContextConfig, and the settings of the recipe."""
    yield from ("# Configuration", "", "## LongContextConfig", "", str(LongContextConfig.__doc__))
    yield from ("It is frozen, and takes keyword arguments only.", "")
    texts = {field.name: field.metadata["help"] for field in dataclasses.fields(Parallelism)}
    for field in dataclasses.fields(LongContextConfig):
        text = texts[SHORT_NAMES.get(field.name, field.name)].replace("%%", "%")
        names = ", ".join(map(repr, NAMES.get(field.name, ()))) or kind_of(field.type)
        yield from (f"### `{field.name}`", "", f"`{names}`,")
        yield from (f"by default `{field.default!r}`.", "", textwrap.fill(text, 100), "")
    yield from ("## Settings of the recipe for text", "", str(Settings.__doc__), "")
    yield "The setting `max_steps` is the flag `--max-steps`, and the line `max_steps: 100` of"
    yield from ("`finetune.yaml`; a flag wins over the file.", "")
    yield from settings_table(dataclasses.fields(Settings), texts)
    yield from ("", "## Settings of the recipes over TRL", "")
    yield "In `sft.yaml` and `dpo.yaml`, beside all settings of TRL's SFTConfig or DPOConfig."
    known = {field.name for field in dataclasses.fields(Settings)}
    others = [field for field in dataclasses.fields(TrlSettings) if field.name not in known]
    yield from ("Those of the model and of how ranks share rows are as above; the others:", "")
    yield from settings_table(others, texts)


def settings_table(fields: Sequence[Any], texts: Mapping[str, str]) -> Iterator[str]:
    """One line for each setting; `texts` has those that LongContextConfig explains."""
    yield from ("| setting | default | what it is |", "|---|---|---|")
    for field in fields:
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else " ".join(made())
        shown = "" if default in ("", None) else f"`{str(default).lower()}`"
        above = "as in LongContextConfig" if field.name in texts else field.metadata["help"]
        yield row(f"`{field.name}`", shown, above)


def kind_of(annotation: Any) -> str:
    """A field's type; choices are written as in Python."""
    if get_origin(annotation) is Literal:
        return ", ".join(repr(choice) for choice in get_args(annotation))
    if get_args(annotation):
        return " or ".join(kind_of(part) for part in get_args(annotation))
    return "None" if annotation is NoneType else str(annotation.__name__)


def row(*cells: str) -> str:
    """One line of a table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def api() -> Iterator[str]:
    """Signatures and docstrings of all public names."""
    yield from (
        "# Python",
        "",
        "Import these names from `longctx_patch`; they load at first use.",
        "",
    )
    for name in longctx_patch.__all__:
        yield from entry(name, getattr(longctx_patch, name))
    for name in MASKS:
        yield from entry(f"masks.{name}", getattr(masks, name))


def entry(name: str, value: Any) -> Iterator[str]:
    """The signature and docstring of one name, and of the public members of a class."""
    heading = name.replace("__", r"\_\_")  # else it would be bold
    yield from (f"## {heading}", "", "```text")
    if not callable(value):
        yield from (f"A {type(value).__name__}.", "```", "")
        return
    members = vars(value).items() if isinstance(value, type) else ()
    if not members or is_made_by_users(value):
        yield from (signature(name, value), "")
    yield documented(value)
    for member, inner in members:
        if member.startswith("_") or not isinstance(inner, property | classmethod | FunctionType):
            continue
        what = inner.fget if isinstance(inner, property) else getattr(value, member)
        if text := documented(what):
            shown = member if isinstance(inner, property) else signature(member, what)
            yield from ("", shown, textwrap.indent(text, "    "))
    yield from ("```", "")


def is_made_by_users(cls: type) -> bool:
    """Whether users call the class; exceptions and handles are made by the library only."""
    if issubclass(cls, Exception) or cls is LongContextConfig:
        return False
    return not any(name.startswith("_") for name in inspect.signature(cls).parameters)


def documented(value: Any) -> str:
    """The docstring; empty where a dataclass or a NamedTuple generated one."""
    text = inspect.getdoc(value) or ""
    return "" if text.startswith(f"{getattr(value, '__name__', '')}(") else text


def signature(name: str, value: Any) -> str:
    """`name(arguments) -> result`, without the folders of our modules."""
    text = str(inspect.signature(value)).replace("(self, ", "(").replace("(self)", "()")
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])|~", "", text)
    text = re.sub(r"<function (\S+) at 0x\w+>", r"\1", text)
    text = re.sub(r"(-> |: )'([^']+)'", r"\1\2", text)
    return name + (re.sub(r", (?=\*|\w+:)", ",\n    ", text) if len(text) > 80 else text)


def cli() -> Iterator[str]:
    """Arguments and options of every command."""
    assert isinstance(longctx, click.Group)
    yield from ("# Command line", "", str(longctx.help), "")
    for name, command in sorted(longctx.commands.items()):
        # Click makes a command's help option once, by the first context that it sees.
        settings: dict[str, Any] = dict(longctx.context_settings)
        context = click.Context(command, info_name=f"longctx {name}", **settings)
        usage = " ".join(command.collect_usage_pieces(context))
        yield from (f"## longctx {name}", "", f"`longctx {name} {usage}`", "")
        yield from (inspect.cleandoc(command.help or ""), "")
        yield from ("| option | what it does |", "|---|---|")
        for parameter in command.params:
            option, text = parameter.get_help_record(context) or ("", "")
            if text:
                yield row(f"`{option}`", text.replace("  [", " ["))
        yield ""


if __name__ == "__main__":
    for file_name, page in pages().items():
        (FOLDER / file_name).write_text(page, encoding="utf-8")
        sys.stdout.write(f"{FOLDER / file_name}\n")
