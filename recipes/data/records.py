"""Says what kind of record a source holds, and refuses with its file and row."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["text", "chat", "completion", "preference", "tokens"]
TooLong = Literal["refuse", "cut", "split"]
"""What becomes of a record that is longer than a row."""
TEXT_FILE = ""
"""The only field of a text file's record."""
CHAT_FIELDS = ("messages", "conversations")
FIELDS: dict[Kind, str] = {
    "tokens": "`input_ids` and, optionally, `labels`",
    "preference": "`chosen` and `rejected`, and a `prompt` or none",
    "completion": "`prompt` and `completion`",
    "chat": "`messages`, or `conversations`",
    "text": "a field of text",
}


class BadRecord(ValueError):
    """A record that can't be trained on: the message begins with its file and row."""


class LongRecord(BadRecord):
    """A record of more tokens than a row takes."""

    tokens = 0


class NoRecords(ValueError):
    """A source whose files hold nothing to train on. Its `losses` say what of it was left out."""

    def __init__(self, message: str, losses: Any) -> None:
        super().__init__(message)
        self.losses = losses


class Record(NamedTuple):
    """One line of a source."""

    fields: Mapping[str, Any]
    place: object
    """Whose text is, for example, `chats.jsonl, line 17`."""

    def refused(self, why: str) -> BadRecord:
        return BadRecord(f"{self.place}: {why}")

    def too_long(self, tokens: int, seq_len: int, fix: str) -> LongRecord:
        error = LongRecord(f"{self.place}: {tokens} tokens, and rows have {seq_len} at most{fix}")
        error.tokens = tokens
        return error


def is_empty_file(record: Record) -> bool:
    """Says whether it is that of a file without text, such as one that marks a folder as whole."""
    return record.fields.get(TEXT_FILE) == ""


def named(source: str, error: object) -> str:
    """An error's text, which begins with the source where it does not name it itself."""
    text = str(error)
    return text if source in text else f"{source}: {text}"


def unreadable(source: str, error: OSError) -> str:
    """The refusal of a file that the system does not give."""
    path = error.filename or source
    return f"{path} can't be read ({error.strerror or error}). See its permissions and its disk."


def kind_of(record: Record, text_field: str) -> Kind:
    """The kind of a record, by its fields. Raises BadRecord for one of no known kind."""
    fields = {name for name, value in record.fields.items() if value is not None}
    if "input_ids" in fields:
        return "tokens"
    if {"chosen", "rejected"} <= fields:
        return "preference"
    if {"prompt", "completion"} <= fields:
        return "completion"
    if fields & set(CHAT_FIELDS):
        return "chat"
    if TEXT_FILE in fields or isinstance(record.fields.get(text_field), str):
        return "text"
    for one, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if one in fields:
            raise record.refused(f"it has {one!r} and no {other!r}. A pair has both.")
    raise record.refused(_why_unknown(record.fields, text_field))


def _why_unknown(fields: Mapping[str, Any], text_field: str) -> str:
    found = no_text(fields, text_field)
    if texts := names_of_texts(fields):
        return f"{found} Give --text-field NAME, for example --text-field {texts[0]}."
    return f"{found} A record has {'; or '.join(FIELDS.values())}."


def no_text(fields: Mapping[str, Any], text_field: str) -> str:
    """Returns what the field of text holds instead, or which others there are."""
    if text_field in fields:
        value = fields[text_field]
        held = "null" if value is None else f"{str(value)[:40]} (a {type(value).__name__})"
        return f"the field {text_field!r} is {held}, not a text."
    others = [name if value is not None else f"{name} (null)" for name, value in fields.items()]
    return f"no text in field {text_field!r}, there is: {', '.join(others) or 'nothing'}."


def names_of_texts(fields: Mapping[str, Any]) -> list[str]:
    return [name for name, value in fields.items() if isinstance(value, str)]
