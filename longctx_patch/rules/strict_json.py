"""JSON as its standard (RFC 8259) has it, of which Python's reader takes more and says less.

NaN and Infinity are no numbers of JSON, a name that is given twice would drop a value in silence,
and half of a pair of surrogates is no character: no tokenizer takes it.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
"""The byte order mark, with which some programs begin a file."""


def loads(text: str) -> Any:
    """The value. Raises ValueError in words, which name the field where there is one."""
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return float(name)

    try:
        found = json.loads(
            text.removeprefix(MARK), parse_constant=constant, object_pairs_hook=_object
        )
    except RecursionError:
        raise ValueError("lists or objects within each other, too many to read") from None
    if constants:
        place = next(_places(found, "", _is_infinite), "")
        raise ValueError(f"{place or 'the value'} is {constants[0]}, which is no number of JSON")
    if "\\u" in text and (half := next(_places(found, "", _is_half), None)) is not None:
        raise ValueError(
            f"{half or 'the value'} has half of a pair of surrogates (\\ud800 to \\udfff), which "
            "is no character"
        )
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} is given twice")
    return found


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_half(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def _places(value: Any, place: str, is_wrong: Callable[[Any], bool]) -> Iterator[str]:
    """Returns where wrong values are, such as `messages[1].content`."""
    if isinstance(value, dict):
        for name, each in value.items():
            if is_wrong(name):
                yield f"a name in {place or 'the object'}"
            yield from _places(each, f"{place}.{name}".lstrip("."), is_wrong)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _places(each, f"{place}[{number}]", is_wrong)
    elif is_wrong(value):
        yield place
