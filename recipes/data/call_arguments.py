"""Arguments of tool calls that a record has as JSON in a text, as OpenAI's API gives them.

A template that writes arguments by `tojson` puts such a text in quotes and escapes those inside, so
that the model would learn calls that nobody can read. Others write a text as it is, or want one. So
the conversation is rendered with a text of its own in place of each.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longctx_patch.recipes.data.records import BadRecord
from longctx_patch.recipes.data.turns import Message

_CALLS = ("tool_calls", "function_call")
_PROBE = '{"Zq7xj": "Zq7xj"}'
_ESCAPED = json.dumps(_PROBE)[1:-1]


def escaped_arguments(
    messages: Sequence[Message], write: Callable[[Sequence[Message]], str]
) -> tuple[int, str] | None:
    """The first arguments that the template would escape, and the message, counted from 0.

    `write` gives the text of messages, and raises BadRecord if the template refuses them.
    """
    marked, found = _probed(messages)
    if not found:
        return None
    try:
        return found[0] if _ESCAPED in write(marked) else None
    except BadRecord:  # the template takes no such text
        return None


def hint_of_mappings(messages: Sequence[Message], error: Exception) -> str:
    """A sentence, after a space, where a template looks for the items of such a text; else ""."""
    _, found = _probed(messages)
    if not found or "item" not in str(error):
        return ""
    number, arguments = found[0]
    return (
        f" Message {number + 1} calls a tool with the arguments {arguments[:60]!r}, a text: give "
        "an object in its place, as json.loads makes it."
    )


def _probed(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[int, str]]]:
    """(messages with a text of their own in place of each, the numbers of messages and texts)"""
    found: list[tuple[int, str]] = []

    def probed(number: int, value: Any) -> Any:
        if isinstance(value, list):
            return [probed(number, each) for each in value]
        if not isinstance(value, Mapping):
            return value
        changed = {**value}
        if "function" in value:
            changed["function"] = probed(number, value["function"])
        arguments = value.get("arguments")
        if isinstance(arguments, str) and _is_object(arguments):
            found.append((number, arguments))
            changed["arguments"] = _PROBE
        return changed

    marked: list[Message] = [
        {name: probed(n, value) if name in _CALLS else value for name, value in message.items()}
        for n, message in enumerate(messages)
    ]
    return marked, found


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
