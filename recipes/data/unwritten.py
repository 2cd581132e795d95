"""Fields of a conversation that its chat template leaves out.

A template writes what it knows of and is silent of the rest: plain ChatML of tools and their calls,
many of the name of whoever speaks. The conversation is rendered with a word of its own in place of
each field's value: a field whose words are not all in the text is left out. What a content has up
to its last `</think>` is thinking, as templates read it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from longctx_patch.recipes.data.records import BadRecord
from longctx_patch.recipes.data.turns import Message

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of one field: transformers gives a template the one that it reads, where it is told any."""
FIELDS = ("tools", "tool_calls", "function_call", *REASONING, "name")
"""The fields that are looked for; roles and contents have checks of their own."""
END_OF_THINKING = "</think>"
Tools = Sequence[Any] | None
Write = Callable[[Sequence[Message], Tools], str]


class Field(NamedTuple):
    """A field of a conversation that says something."""

    message: int | None
    """Counted from 0; None: it belongs to the whole conversation."""
    name: str


def unwritten(messages: Sequence[Message], tools: Tools, write: Write) -> dict[Field, bool]:
    """The fields that the template leaves out, and whether it leaves out all of each.

    `write` gives the text of a conversation, and raises BadRecord if the template refuses it.
    """
    fields = [Field(None, "tools")] if tools else []
    for place, message in enumerate(messages):
        fields += [Field(place, name) for name in names_of(message)]
    if not fields:
        return {}
    words = _Words()
    marked = [words.in_message(place, message) for place, message in enumerate(messages)]
    try:
        text = write(marked, words.in_tools(tools))
    except BadRecord:  # the template takes no such words
        words, text = _Words(), ""
    written = {place for word, place in words.places.items() if word in text}
    found = {place for word, place in words.places.items() if word not in text}
    unmarked = set(fields) - {*words.places.values()}
    if unmarked:
        whole = write(messages, tools)
        found |= {each for each in unmarked if write(*_without(messages, tools, each)) == whole}
    return {each: each not in written for each in fields if each in found}


def names_of(message: Message) -> list[str]:
    """The fields of a message that say something; reasoning under one of its names."""
    names = [name for name in FIELDS[1:] if message.get(name)]
    reasons = [name for name in names if name in REASONING]
    content = message.get("content")
    if not reasons and _with_thinking(content, lambda: "w") != _with_thinking(content, str):
        names.append("thinking")
    return [name for name in names if name not in reasons[1:]]


def _with_thinking(content: Any, word: Callable[[], str]) -> Any:
    """A content with words in place of its thinking."""
    if isinstance(content, list):
        return [
            {**part, "text": _with_thinking(part.get("text"), word)}
            if isinstance(part, Mapping)
            else part
            for part in content
        ]
    if not isinstance(content, str):
        return content
    thinking, end, answer = content.rpartition(END_OF_THINKING)
    texts = re.split("(</?think>)", thinking)  # every other one is a tag
    texts = [word() if n % 2 == 0 and t.strip() else t for n, t in enumerate(texts)]
    return "".join([*texts, end, answer])


def _without(
    messages: Sequence[Message], tools: Tools, field: Field
) -> tuple[Sequence[Message], Tools]:
    if field.message is None:
        return messages, None
    names = REASONING if field.name in REASONING else (field.name,)
    kept = {n: v for n, v in messages[field.message].items() if n not in names}
    if field.name in REASONING and "content" in kept:
        kept["content"] = _with_thinking(kept["content"], str)
    return [*messages[: field.message], kept, *messages[field.message + 1 :]], tools


@dataclass(frozen=True)
class _Words:
    """Words in place of fields' values."""

    places: dict[str, Field] = field(default_factory=dict)
    """Whose each word is."""

    def _new(self, place: Field) -> str:
        word = f"Zq{len(self.places)}w"
        self.places[word] = place
        return word

    def in_message(self, number: int, message: Message) -> Message:
        changed = dict(message)
        for name in names_of(message):
            place, value = Field(number, name), message.get(name)
            if name in REASONING and "content" in message:
                changed["content"] = _with_thinking(message["content"], partial(self._new, place))
            if name == "tool_calls" and isinstance(value, list):
                changed[name] = [self._in_function(place, call) for call in value]
            elif name == "function_call":
                changed[name] = self._in_function(place, value)
            elif isinstance(value, str):
                word = self._new(place)
                also = REASONING if name in REASONING else (name,)
                changed |= {other: word for other in also if message.get(other)}
        return changed

    def in_tools(self, tools: Tools) -> Tools:
        return tools and [self._in_function(Field(None, "tools"), tool) for tool in tools]

    def _in_function(self, place: Field, call: Any) -> Any:
        """A call, or a tool: its name, and the first of its arguments."""
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._in_function(place, call["function"])}
        changed = dict(call)
        if isinstance(call.get("name"), str):
            changed["name"] = self._new(place)
        arguments = call.get("arguments")
        if isinstance(arguments, Mapping) and arguments:
            changed["arguments"] = {**arguments, next(iter(arguments)): self._new(place)}
        elif isinstance(arguments, str):
            changed["arguments"] = self._new(place)
        return changed
