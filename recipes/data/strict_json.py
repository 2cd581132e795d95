"""JSON as its standard (RFC 8259) has it, of which Python's reader takes more and says less.

NaN and Infinity are no numbers of JSON, a name that is given twice would drop a value in silence,
and half of a pair of surrogates is no character: no tokenizer takes it.
"""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
"""The byte order mark, with which some programs begin a file."""


def loads(text: str) -> Any:
    """The value. Raises ValueError, also for a depth that Python can't read, in words."""
    try:
        found = json.loads(
            text.removeprefix(MARK), parse_constant=_refuse, object_pairs_hook=_object
        )
    except RecursionError:
        raise ValueError("lists or objects within each other, too many to read") from None
    if "\\u" in text:
        for place in _half_pairs(found, ""):
            raise ValueError(
                f"{place or 'the value'} has half of a pair of surrogates (\\ud800 to \\udfff), "
                "which is no character"
            )
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON; write null, or leave the field out")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} is given twice")
    return found


def _half_pairs(value: Any, place: str) -> Iterator[str]:
    """The places of texts that can't be encoded."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            yield place
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _half_pairs(name, f"a name in {place}" if place else "a name")
            yield from _half_pairs(each, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _half_pairs(each, f"{place}[{number}]")
