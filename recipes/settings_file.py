"""Settings from a YAML file and from flags, for all recipes: names and types are checked alike."""

import argparse
import dataclasses
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin

import click
from transformers import HfArgumentParser

from longctx_patch.recipes.yaml_file import read_yaml
from longctx_patch.rules.gone import GONE_SETTINGS
from longctx_patch.rules.names import did_you_mean

OUTPUT = ("output", "output_dir")
"""Names of the folder to write, in our recipe and in transformers: each recipe takes both."""
_ALIKE = (
    *(("text", "data"), ("settings", "config"), ("pack", "packing")),
    *(("batch_size", "per_device_train_batch_size"), ("scheduler", "lr_scheduler_type")),
    *(("save_every", "save_steps"), ("keep_last", "save_total_limit"), ("seq_len", "max_length")),
    *(("checkpoint", "gradient_checkpointing"), ("seq_len", "max_seq_length")),
    *(("push_to_hub", "hub_model_id"), ("epochs", "num_train_epochs"), ("lr", "learning_rate")),
    ("steps", "max_steps"),
)
"""Names of one setting in different recipes, or in TRL."""
_SIMPLE = (int, float, bool, str)


def setting(help_text: str, *, default: Any, **options: Any) -> Any:
    """A dataclass field with the line that `--help` prints. `options`: argparse's own."""
    metadata = {"help": help_text, **options}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class SettingsParser(HfArgumentParser):
    """Raises ValueError, without the pages of its usage, and knows the nearest right name."""

    def format_help(self) -> str:
        """The flags, by the class that has their setting. docs/reference/config.md says more."""
        formatter = click.HelpFormatter(max_width=100)
        actions = {action.dest: action for action in self._actions}
        for owner, names in self._names_by_owner().items():
            with formatter.section(owner):
                formatter.write_dl(
                    [_flag_and_help(actions[name], self.get_default(name)) for name in names]
                )
        return formatter.getvalue()

    def _names_by_owner(self) -> dict[str, list[str]]:
        """Names of settings by the first sentence of the class that brings them, as a title; those
        of another package by the names of class and package."""
        found: dict[str, list[str]] = {}
        for kind in self.dataclass_types:
            for field in dataclasses.fields(kind):
                (owner, *_) = (c for c in reversed(kind.__mro__) if field.name in _own_fields(c))
                package = owner.__module__.split(".")[0]
                title = str(owner.__doc__).split(".")[0]
                title = title if package == "longctx_patch" else f"{owner.__name__} of {package}"
                if field.init:
                    found.setdefault(title, []).append(field.name)
        return found

    def error(self, message: str) -> NoReturn:
        _, is_unknown, rest = message.partition("unrecognized arguments: ")
        if is_unknown:
            self.refuse_unknown(rest.split())
        raise ValueError(f"{message}. --help lists all flags.")

    def refuse_unknown(self, words: Sequence[str], *others: str) -> NoReturn:
        """Raise ValueError for words that are no flags, of this parser or `others`."""
        flag = next((word for word in words if word.startswith("--")), words[0])
        known = [o for o in (*self._option_string_actions, *others) if o.startswith("--")]
        name = flag.split("=")[0]
        meant = nearest(name.removeprefix("--").replace("-", "_"), [n[2:] for n in known], "--")
        raise ValueError(f"unknown flag {name}.{meant} --help lists all flags.")


def _own_fields(kind: type) -> Iterable[str]:
    return vars(kind).get("__annotations__", ())


def _flag_and_help(action: argparse.Action, default: Any) -> tuple[str, str]:
    """A flag with what it takes, and the first sentence of its help with the value without it."""
    flag = action.option_strings[-1]
    text = " ".join((action.help or "").replace("%%", "%").split()).split(". ")[0].rstrip(".")
    if isinstance(default, bool):
        is_no = flag.startswith("--no-")
        return flag, ("not: " if is_no else "") + text + (" [yes]" if default is not is_no else "")
    values = "N" if action.type is int else "X" if action.type is float else "TEXT"
    values = values if action.choices is None else "|".join(map(str, action.choices))
    shown = " ".join(map(str, default)) if isinstance(default, list) else default
    return f"{flag} {values}", text if shown in (None, "") else f"{text} [{shown}]"


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A sentence, after a space, that names the setting that is meant, or says why the setting
    went; "" if none is near."""
    if name in GONE_SETTINGS:
        return f" {GONE_SETTINGS[name]}"
    known = set(known)
    for pair in _ALIKE:
        if name in pair:
            (other,) = set(pair) - {name}
            if other in known:
                return f" Here it is called {prefix}{other}."
    return did_you_mean(name, sorted(known)).replace("'", f"'{prefix}", 1)


def file_and_flags(
    flag: str, arguments: Sequence[str] | None = None
) -> tuple[Path | None, list[str]]:
    """The file that `flag` names, and the other arguments (default: of `sys.argv`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    files, flags = [], []
    while given:
        word = given.pop(0)
        if word == flag and (not given or given[0].startswith("--")):
            raise ValueError(f"{flag} without a file: give {flag} FILE.yaml.")
        if word == flag:
            files.append(given.pop(0))
        elif word.startswith(f"{flag}="):
            files.append(word.removeprefix(f"{flag}="))
        else:
            flags.append(word)
    if len(files) > 1:
        raise ValueError(f"{flag} names {' and '.join(files)}. Give one file.")
    return (Path(files[0]) if files else None), flags


def with_own_output(flags: Sequence[str], own: str) -> list[str]:
    """Flags in which the output has the name `own`, one of `OUTPUT`."""
    found = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        is_output = name.startswith("--") and name[2:].replace("-", "_") in OUTPUT
        found.append(f"--{own}{equals}{value}" if is_output else flag)
    return found


def read_settings(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The file's values, each as the type of its field. Raises ValueError with the file and name.

    `kinds`: the type of each setting that there is.
    """
    content = read_yaml(path)
    # Older run folders have settings that went, which at 0 or null asked for nothing.
    content = {k: value for k, value in content.items() if value or k not in GONE_SETTINGS}
    for name in [name for name in OUTPUT if name in content and name not in kinds]:
        (own,) = (other for other in OUTPUT if other in kinds)
        if own in content:
            raise ValueError(f"{path}: both {name} and {own} are set. Give one of them.")
        content[own] = content.pop(name)
    for name in content:
        if name not in kinds:
            meant = nearest(name, kinds) or " docs/reference/config.md lists all."
            raise ValueError(f"{path}: unknown setting {name}.{meant}")
    return {name: typed(path, name, value, kinds[name]) for name, value in content.items()}


def typed(path: Path, name: str, value: Any, wanted: Any) -> Any:
    """`value` as the field's type: YAML 1.1 reads 1e-4 as a string, and one path isn't a list.

    Types other than numbers, texts, yes or no, and lists of these, are left to their owner.
    """
    kinds = _members(wanted)
    if value is None and (type(None) in kinds or wanted is Any):
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    for kind in kinds:
        if get_origin(kind) is list and (isinstance(value, list) or str not in kinds):
            values = value if isinstance(value, list) else [value]
            (inner,) = get_args(kind) or (Any,)
            return [_item(path, name, each, inner) for each in values]
    if any(kind not in _SIMPLE and get_origin(kind) is not list for kind in kinds):
        return value
    if type(value) in kinds:
        return value
    if float in kinds and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise ValueError(f"{path}: {name}: {value!r} should be of type {names}.")


def _item(path: Path, name: str, value: Any, wanted: Any) -> Any:
    if wanted is str and isinstance(value, int | float):
        return str(value)
    return typed(path, name, value, wanted)


def _members(wanted: Any) -> list[Any]:
    if get_origin(wanted) in (Union, types.UnionType):
        return [member for part in get_args(wanted) for member in _members(part)]
    return [wanted]


def set_environment(values: dict[str, Any]) -> None:
    """Set the variables of `env`, as TRL's parser does, and take it out of the values."""
    for name, value in (values.pop("env", None) or {}).items():
        os.environ[name] = str(value)
