"""Options on a command line: `name=value,name=value`."""

import json
from collections.abc import Mapping
from typing import Any

from longctx_patch import LongContextConfig

NAMES = {"ulysses": "ulysses_degree", "ring": "ring_degree"}
"""Short names of fields of LongContextConfig."""


def options_of(text: str) -> dict[str, Any]:
    """Options by name; values that are numbers or booleans in JSON become such.

    Example:
        >>> options_of("ulysses=4,checkpoint=auto")
        {'ulysses': 4, 'checkpoint': 'auto'}
    """
    pairs = [part.split("=", 1) for part in text.split(",") if part]
    wrong = [pair[0] for pair in pairs if len(pair) != 2]
    if wrong:
        raise ValueError(f"{text!r}: {wrong[0]!r} has no value. Write name=value,name=value.")
    return {name.strip(): _value(value.strip()) for name, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def config_of(text: str) -> LongContextConfig:
    """The config with these fields; also `ulysses=` and `ring=` for the degrees."""
    fields = {NAMES.get(name, name): value for name, value in options_of(text).items()}
    try:
        return LongContextConfig(**fields)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}. Name fields of LongContextConfig.") from error


def name_of(fields: Mapping[str, Any]) -> str:
    """The text that `options_of` reads as these fields; degrees of 1 are left out."""
    short = {full: name for name, full in NAMES.items()}
    named = {short.get(name, name): value for name, value in fields.items()}
    kept = {
        name: value
        for name, value in named.items()
        if not (name in NAMES and value == 1) and not (name == "plan" and value == "auto")
    }
    return ",".join(f"{name}={value}" for name, value in kept.items())
