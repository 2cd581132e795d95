"""Chat records as tokens, by the template of the model's tokenizer, and which of them are learned.

Conventions are TRL's: `messages` (or `conversations`, ChatML's older form), `tools`,
`chat_template_kwargs`. The assistant's tokens are those that a template marks by
`{% generation %}`; where it marks none, `turns.py` finds them.
"""

import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from longctx_patch.recipes.data.call_arguments import escaped_arguments, hint_of_mappings
from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.records import Record
from longctx_patch.recipes.data.specials import MARK, Specials, Tokens, without_marks
from longctx_patch.recipes.data.turns import Conversation, Message
from longctx_patch.recipes.data.unwritten import (
    END_OF_THINKING,
    REASONING,
    Field,
    names_of,
    unwritten,
)
from longctx_patch.recipes.data.windows import ids_of_text, tokens_of_text

Marks = Literal["own", "trl", "none"]
MARKED: dict[Marks, str] = {
    "own": "as the template marks them",
    "trl": "as TRL's training version of the template marks them",
    "none": "the template marks none: the assistant's turns, found by rendering parts",
}
"""How the assistant's tokens are found."""
MOST_CHARACTERS = 2**25
"""The most characters of a conversation: each takes about 66 bytes while turns are found."""
MOST_SECONDS = 20.0
"""Seconds of computing that a template may take for one conversation."""
_SEEN = ("image", "images", "video", "videos", "audio")
"""Columns of TRL's that a conversation's placeholders stand for."""


@dataclass(frozen=True)
class Template:
    """The chat template of a tokenizer, as training uses it."""

    tokenizer: Any
    assistant_only: bool
    marks: Marks
    """Who has marked the assistant's tokens, where these alone are learned."""
    text: str | None = None
    """TRL's template that marks them; None: the tokenizer's own."""
    may_leave_out: tuple[str, ...] = ()
    """Fields of messages that the template need not write."""
    split_special_tokens: bool = False
    """Whether special tokens that messages write themselves are read as letters."""

    @cached_property
    def _place(self) -> str:
        return _place_of_template(self.tokenizer)

    @cached_property
    def _added(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self.tokenizer.get_added_vocab()
        return found

    @cached_property
    def _specials(self) -> Specials:
        return Specials(self.tokenizer)

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        assistant_only: bool,
        may_leave_out: Sequence[str] = (),
        split_special_tokens: bool = False,
    ) -> "Template":
        """Raises ValueError for a tokenizer that has no template, and where the assistant's tokens
        alone are learned also for a template in which they, or the end of a turn, are not found."""
        from trl.chat_template_utils import (
            get_training_chat_template,
            has_generation_markers,
        )

        own = tokenizer.chat_template
        if own is None:
            raise ValueError(
                "the data is conversational, and the tokenizer has no chat template. Take the "
                "instruction-tuned model's tokenizer (--tokenizer NAME), or give a template "
                "(--chat-template FILE)."
            )
        for text in own.values() if isinstance(own, dict) else [own]:
            check_template(text, _place_of_template(tokenizer))
        if split_special_tokens and not tokenizer.is_fast:
            raise ValueError(
                "split_special_tokens with a slow tokenizer, which can't tell where in the text a "
                "token is. Take the fast one (tokenizer.json), or leave it out."
            )
        if assistant_only and not tokenizer.is_fast:
            raise ValueError(
                "assistant_only_loss=True with a slow tokenizer, which can't tell where in the "
                "text a token is. Take the fast one (tokenizer.json), or learn all tokens "
                "(assistant_only_loss: false)."
            )
        found = cls(
            tokenizer,
            assistant_only,
            "own",
            may_leave_out=tuple(may_leave_out),
            split_special_tokens=split_special_tokens,
        )
        if assistant_only and not has_generation_markers(own):
            try:
                with _limited(_place_of_template(tokenizer)):
                    text = get_training_chat_template(tokenizer)
                found = replace(found, marks="trl", text=text)
            except ValueError:  # TRL doesn't know it
                found = replace(found, marks="none")
        if assistant_only and not found._learns_to_stop():
            raise ValueError(_NO_STOP)
        return found

    def _learns_to_stop(self) -> bool:
        """Says whether the last token that is learned of a turn was added by the tokenizer."""
        roles = ("user", "assistant") if self.marks == "none" else ("user", "assistant", "user")
        turns = [{"role": role, "content": "w"} for role in roles]
        ids, learned = self.tokens(Record({}, "the template's check"), turns)
        words = [self.tokenizer.decode([i]) for i, yes in zip(ids, learned, strict=True) if yes]
        ends = {self.tokenizer.decode([i]) for i in self.tokenizer.get_added_vocab().values()}
        last = next((word for word in reversed(words) if word.strip()), "")
        return last in (ends | {self.tokenizer.eos_token}) - {self.tokenizer.unk_token}

    def tokens(
        self,
        record: Record,
        messages: Sequence[Message],
        *,
        ends: bool = True,
        may_be_empty: bool = False,
        losses: Losses | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Ids of a conversation, and which of them are learned.

        `ends`: whether it ends with these messages; else the assistant is about to answer.
        `may_be_empty`: whether the assistant may say nothing. `losses` counts fields that the
        template leaves out and may.

        Raises BadRecord for messages that the template refuses, for those that it leaves out, as
        many do with roles that they don't know, for fields that it leaves out, and for arguments of
        tools that it would escape.
        """
        _check_kinds(record, messages)
        text, spans = self._rendered(record, messages, ends=ends)
        if len(text) > MOST_CHARACTERS:
            raise record.refused(
                f"a conversation of {len(text):,} characters, and {MOST_CHARACTERS:,} are read at "
                "most. Leave it out, or split it into several records."
            )
        self._check_roles(record, messages, text)
        if ends:
            self._check_arguments(record, messages)
            left_out = self._check_fields(record, messages)
            if losses is not None:
                for _, name in left_out:
                    losses.note(record, f"{name} that the chat template leaves out (may_leave_out)")
            if not may_be_empty:
                _check_answers(record, messages, left_out)
        finds = self.assistant_only and ends
        if not (finds or self.split_special_tokens):
            ids = ids_of_text(text, self.tokenizer, special=False)
            return ids, [True] * len(ids)
        if self.split_special_tokens:
            record, messages = self._marked(record, messages)
            plain, (text, spans) = text, self._rendered(record, messages, ends=ends)
            if text.replace(MARK, "") != plain:
                raise record.refused(
                    "split_special_tokens, and the chat template looks for special tokens in what "
                    "messages say. Take them out of it."
                )
        tokens = Tokens(*(each.tolist() for each in tokens_of_text(text, self.tokenizer)))
        if self.marks == "none" and finds:
            spans = Conversation(
                record,
                messages,
                text,
                lambda part, ends: self._rendered(record, part, ends=ends)[0],
                self.tokenizer,
                self._added,
            ).turns(*tokens)
        if self.split_special_tokens:
            tokens = self._specials.without_marks(record, text, tokens)
            spans = without_marks(text, spans)
        learned = _overlapping(tokens.offsets, spans) if finds else [True] * len(tokens.ids)
        return tokens.ids, learned

    def _marked(
        self, record: Record, messages: Sequence[Message]
    ) -> tuple[Record, Sequence[Message]]:
        """With a mark in each special token that they write."""
        tools = self._specials.marked(record, _tools(record))
        marked: Sequence[Message] = self._specials.marked(record, messages)
        return record._replace(fields={**record.fields, "tools": tools}), marked

    def _rendered(
        self, record: Record, messages: Sequence[Message], *, ends: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where in it the assistant speaks."""
        tools = _tools(record)
        options = {**self.tokenizer.special_tokens_map, **_template_kwargs(record)}
        try:
            with _limited(self._place):
                (text,), spans = render_jinja_template(
                    conversations=[[_without_none(message) for message in messages]],
                    tools=tools,
                    chat_template=self.text or self.tokenizer.get_chat_template(tools=tools),
                    return_assistant_tokens_mask=self.assistant_only and self.marks != "none",
                    add_generation_prompt=not ends,
                    **options,
                )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            if isinstance(error, TypeError) and "list" in str(error):  # not joined with a text
                _check_parts(record, messages)
            hint = hint_of_mappings(messages, error)
            raise record.refused(f"the chat template refuses it: {error}{hint}") from error
        _check_parts(record, messages, text)
        return text, spans[0] if spans else []

    def _check_arguments(self, record: Record, messages: Sequence[Message]) -> None:
        found = escaped_arguments(
            messages, lambda given: self._rendered(record, given, ends=True)[0]
        )
        if found is not None:
            number, arguments = found
            raise record.refused(
                f"message {number + 1} calls a tool with the arguments {arguments[:60]!r}, a text, "
                "and the chat template would escape its quotes, so that the model would learn to "
                "write such calls. Give an object in its place, as json.loads makes it."
            )

    def _check_fields(self, record: Record, messages: Sequence[Message]) -> dict[Field, bool]:
        """The fields that the template may leave out and does, and whether all of each."""

        def write(messages: Sequence[Message], tools: Any) -> str:
            with_tools = record._replace(fields={**record.fields, "tools": tools})
            return self._rendered(with_tools, messages, ends=True)[0]

        left_out = unwritten(messages, _tools(record), write)
        for number, name in left_out:
            if name not in self.may_leave_out:
                where = "" if number is None else f" of message {number + 1}"
                if number is not None and name in REASONING and not messages[number].get(name):
                    where += f", which is what its content has before `{END_OF_THINKING}`"
                raise record.refused(
                    f"the chat template leaves out {name}{where}, so the model would not see it. "
                    "Give a template that writes it (--chat-template FILE), or say that it may be "
                    f"left out: may_leave_out: [{name}] (`longctx patch --may-leave-out {name}`)."
                )
        return left_out

    def _check_roles(self, record: Record, messages: Sequence[Message], text: str) -> None:
        for message in messages:
            last = _last_line(message.get("content"))
            if last and last not in text:
                raise record.refused(
                    f"the chat template leaves out the message of role {message.get('role')!r} "
                    f"that ends with {last[-40:]!r}: it doesn't know the role. Rename it, or "
                    "give a tokenizer whose template knows it."
                )


def _check_answers(
    record: Record, messages: Sequence[Message], left_out: Mapping[Field, bool]
) -> None:
    """Refuse turns of the assistant that say nothing, which would be learned."""
    for number, message in enumerate(messages):
        said = {*names_of(message)} - {"name"}
        gone = {name for (place, name), wholly in left_out.items() if wholly and place == number}
        said -= gone | set(REASONING if gone & {*REASONING} else ())
        if message["role"] == "assistant" and not said and not _last_line(message.get("content")):
            raise record.refused(
                f"message {number + 1}, of the assistant, says nothing, so the model would learn "
                "to end its turn at once. Leave it out."
            )


def _check_parts(record: Record, messages: Sequence[Message], text: str | None = None) -> None:
    """Refuse contents that are lists where the template takes texts alone.

    `text`: what it has made of them, with Python's brackets and quotes; None: nothing.
    """
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if isinstance(content, list) and (text is None or (content and str(content) in text)):
            raise record.refused(
                f"the content of message {number} is a list of parts, and the chat template takes "
                "texts alone. Join the parts to one text, or give a template that takes them "
                "(--chat-template FILE)."
            )


def _check_kinds(record: Record, messages: Sequence[Message]) -> None:
    """Refuse images and sound, for which a template may write tokens with nothing behind them."""
    columns = (name for name in _SEEN if record.fields.get(name))
    contents = (m.get("content") for m in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    kinds = (str(part.get("type")) for part in parts if isinstance(part, Mapping))
    found = next((kind for kind in kinds if kind != "text"), None) or next(columns, None)
    if found:
        raise record.refused(
            f"it has {found!r}, and recipes train on text alone. Leave such records out; to train "
            "with images, take LongContextTrainer or one of TRL's trainers, or write a loop of "
            "your own (docs/how-to/images.md)."
        )


def check_template(template: str, place: str) -> None:
    """Raise ValueError for a template that is no Jinja, or has no end. `place`: where it is."""
    turn = {"role": "user", "content": "w"}
    try:
        with _limited(place):
            render_jinja_template(conversations=[[turn]], chat_template=template)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template in {place} is no Jinja, in line {error.lineno}: {error.message} "
            "Mend it, or give another (--chat-template FILE)."
        ) from error
    except EndlessTemplateError:
        raise
    except (TemplateError, TypeError, KeyError, ValueError):
        return  # what it says of a conversation is said of a record


class EndlessTemplateError(ValueError):
    """A template that computes for longer, or calls itself deeper, than any conversation takes."""


@contextmanager
def _limited(place: str) -> Iterator[None]:
    """Raise EndlessTemplateError after `MOST_SECONDS` of computing, and where the template calls
    itself without an end. `place`: of the template."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return

    def stop(*_: object) -> None:
        raise EndlessTemplateError(
            f"the chat template in {place} has not come to an end in {MOST_SECONDS:g} s of "
            "computing. Mend its loops, or give another (--chat-template FILE)."
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    except RecursionError as error:
        raise EndlessTemplateError(
            f"the chat template in {place} calls itself without an end, or is nested too deep "
            f"({error}). Mend its macros, or give another (--chat-template FILE)."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _place_of_template(tokenizer: Any) -> str:
    folder = Path(tokenizer.name_or_path)
    files = (folder / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    found = next((str(file) for file in files if file.is_file()), tokenizer.name_or_path)
    return found or "the tokenizer"


def _tools(record: Record) -> Any:
    """The tools of a record, which tables hold as JSON, since their columns have one type."""
    given = record.fields.get("tools")
    said = repr(str(given)[:60])
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise record.refused(f"tools is {said}, which is no JSON ({error}).") from error
    if found is not None and not isinstance(found, list):
        raise record.refused(f"tools is {said}: give a list of tools.")
    return found


def _template_kwargs(record: Record) -> Mapping[str, Any]:
    return record.fields.get("chat_template_kwargs") or {}


def _without_none(message: Message) -> dict[str, Any]:
    """As transformers drops them: templates print a None."""
    return {name: value for name, value in message.items() if value is not None}


def _overlapping(tokens: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Says whether each token has a character in one of the spans; both are in order.

    transformers' own mask goes on to the end of the text where a span ends with a character that
    belongs to no token, such as a space.
    """
    found, place = [], 0
    for start, stop in tokens:
        while place < len(spans) and spans[place][1] <= start:
            place += 1
        found.append(place < len(spans) and spans[place][0] < stop and start < stop)
    return found


def messages_of(record: Record, field: str) -> list[Message]:
    """The messages in a field. Raises BadRecord for something else."""
    from trl.data_utils import maybe_convert_to_chatml

    given = record.fields.get(field)
    if given is None:
        given = maybe_convert_to_chatml(dict(record.fields)).get(field)
    if not _are_objects(given) or not given:
        raise record.refused(f"{field} is {str(given)[:60]!r}: give a list of messages.")
    for number, message in enumerate(given, start=1):
        if not isinstance(message.get("role"), str):
            raise record.refused(f"a message of {field} has no role: {str(message)[:80]!r}.")
        if all(value is None for name, value in message.items() if name != "role"):
            raise record.refused(
                f"message {number} of {field}, of role {message['role']!r}, has no content."
            )
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise record.refused(
                f"message {number} of {field}: its content is {str(content)[:60]} (a "
                f"{type(content).__name__}), not a text."
            )
        calls = message.get("tool_calls")
        if calls is not None and not _are_objects(calls):
            raise record.refused(
                f"message {number} of {field}: its tool_calls is {str(calls)[:60]!r}: give a list "
                "of calls."
            )
    return list(given)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def is_conversation(value: Any) -> bool:
    return isinstance(value, list)


def _last_line(content: Any) -> str:
    """The last line of a message that has something in it, and is no thinking; templates change
    what is before."""
    if isinstance(content, list):
        content = "".join(
            str(part.get("text", "")) for part in content if isinstance(part, Mapping)
        )
    answer = str(content or "").rpartition(END_OF_THINKING)[2]
    lines = [line.strip() for line in answer.splitlines()]
    return next((line for line in reversed(lines) if line), "")


_NO_STOP = (
    "assistant_only_loss=True, and no token of the chat template ends what is learned of the "
    "assistant's turn, so the model would not learn to stop. Put it inside {% generation %} ... "
    "{% endgeneration %}, or learn all tokens (assistant_only_loss: false)."
)
