"""A record of which the chat template leaves out a field is refused with the field's name."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.reading import Reading
from longctx_patch.recipes.data.records import BadRecord, Kind, Record
from longctx_patch.recipes.data.turns import Message
from longctx_patch.recipes.data.unwritten import Tools, unwritten
from tests.recipes.data.test_reading import words
from tests.recipes.data.test_turns import CALLING, CHATML, TOOL, call, said, template_of

THOUGHT = said("assistant", "First.", reasoning_content="so")
THOUGHT_ALOUD = said("assistant", "<think>\nso\n</think>\n\nFirst.")
IN_PARTS = {"role": "assistant", "content": [{"type": "text", "text": "<think>so</think>First."}]}
OLD_CALL = {"name": "find", "arguments": '{"word": "one"}'}
NAMED = [said("user", "One?", name="found"), said("assistant", "First.")]
TWO_CALLS = [
    said("user", "One?"),
    said("assistant", tool_calls=[call(word="one"), call(word="two")]),
]
LEFT_OUT: dict[str, tuple[str, str | None, dict[str, Any], str]] = {
    "tools": ("smollm2", CHATML, {"messages": CALLING[3:], "tools": [TOOL]}, "tools"),
    "calls": ("smollm2", CHATML, {"messages": CALLING}, "tool_calls of message 2"),
    "a second call": ("gpt_oss", None, {"messages": TWO_CALLS}, "tool_calls of message 2"),
    "thinking of an earlier turn": (
        "qwen3",
        None,
        {"messages": [said("user", "One?"), THOUGHT, said("user", "Two?"), THOUGHT]},
        "reasoning_content of message 2",
    ),
    "thinking in the content of an earlier turn": (
        "qwen3",
        None,
        {"messages": [said("user", "One?"), THOUGHT_ALOUD, said("user", "Two?"), THOUGHT_ALOUD]},
        r"thinking of message 2, which is what its content has before `</think>`",
    ),
    "thinking in parts of a content": (
        "smollm2",
        CHATML.replace("m.content", "(m.content[0].text or m.content).split('</think>')[-1]"),
        {"messages": [said("user", "One?"), IN_PARTS]},
        "thinking of message 2, which is what its content has before `</think>`",
    ),
    "an older call": (
        "smollm2",
        CHATML,
        {"messages": [said("user", "One?"), said("assistant", "First.", function_call=OLD_CALL)]},
        "function_call of message 2",
    ),
    "a name": ("llama3_1", None, {"messages": NAMED}, "name of message 1"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_fields_that_the_template_leaves_out(name: str) -> None:
    family, text, fields, left_out = LEFT_OUT[name]
    template, record = template_of(family, text), Record(fields, "a.jsonl, line 7")
    field = left_out.split()[0]
    message = (
        rf"^a.jsonl, line 7: the chat template leaves out {left_out}, .* --may-leave-out {field}"
    )
    with pytest.raises(BadRecord, match=message):
        template.tokens(record, fields["messages"])
    allowed = replace(template, may_leave_out=(field,))
    if name == "calls":  # and then nothing is left of the turn
        with pytest.raises(BadRecord, match="message 2, of the assistant, says nothing, so"):
            allowed.tokens(record, fields["messages"])
    else:
        assert any(allowed.tokens(record, fields["messages"])[1])


def in_text() -> Record:
    """A record whose call has its arguments as OpenAI's API gives them. The same text is a tool's
    answer, and a template may escape that."""
    arguments, calling = '{"word": "one"}', call()
    calling["function"]["arguments"] = arguments
    messages = [
        said("user", "One?"),
        said("assistant", "", tool_calls=[calling]),
        said("tool", json.dumps(arguments), tool_call_id="abcdefghi"),
        said("assistant", "First."),
    ]
    return Record({"messages": messages}, "a.jsonl, line 7")


def writing(arguments: str) -> str:
    """ChatML that writes the arguments of calls in this way."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name + ARGUMENTS }}{% endfor %}"
    return CHATML.replace(
        "{{ m.content }}", calls.replace("ARGUMENTS", arguments) + "{{ m.content }}"
    )


TEXT = (
    r"essage 2 calls a tool with the arguments '\{\"word\": \"one\"\}', a text.* an object in its "
    r"place, as json.loads makes it."
)


@pytest.mark.parametrize(
    ("family", "template", "why"),
    [
        *((name, None, "m" + TEXT) for name in ("qwen2_5", "llama3_1", "gpt_oss", "mistral")),
        (
            "smollm2",
            writing("(c.function.arguments | items | list | string)"),
            "the chat template refuses it: Can only get item pairs from a mapping. M" + TEXT,
        ),
    ],
)
def test_arguments_that_are_json_in_a_text(family: str, template: str | None, why: str) -> None:
    """A template that writes them by `tojson` would escape their quotes."""
    with pytest.raises(BadRecord, match=rf"^a.jsonl, line 7: {why}"):
        template_of(family, template).tokens(record := in_text(), record.fields["messages"])


def test_a_template_that_takes_arguments_in_a_text() -> None:
    template = template_of("smollm2", writing("c.function.arguments"))
    record = in_text()
    assert any(template.tokens(record, record.fields["messages"])[1])


def test_a_template_that_takes_no_other_values() -> None:
    """Fields are then left out one by one."""

    def write(messages: Sequence[Message], tools: Tools) -> str:
        if any(message.get("name") not in (None, "Ann") for message in messages):
            raise BadRecord("who is that?")
        return " ".join(f"{m.get('name', '')} {m.get('thinking', '')}" for m in messages)

    messages = [said("user", name="Ann"), said("user", tool_calls=["odd"], thinking="so")]
    found = unwritten(messages, [TOOL], write)
    assert found == {(None, "tools"): True, (1, "tool_calls"): True}


def test_answers_that_say_nothing() -> None:
    question, record = {"role": "user", "content": "w1"}, Record({}, "a.jsonl, line 3")
    answer = {"role": "assistant", "content": " \n"}
    cases: tuple[tuple[dict[str, Any], Kind, str], ...] = (
        ({"messages": [question, answer]}, "chat", "message 2, of the assistant, says nothing"),
        ({"prompt": [question], "completion": [answer]}, "completion", "message 2, of the assist"),
        ({"prompt": "w1", "completion": " "}, "completion", "completion is empty, so the model"),
    )
    for fields, kind, message in cases:
        with pytest.raises(BadRecord, match=f"line 3: {message}"):
            list(Reading(words(), kind, 100).rows(record._replace(fields=fields), Losses()))
    pair = {"prompt": [question], "chosen": [{**answer, "content": "w2"}], "rejected": [answer]}
    assert list(Reading(words(), "preference", 100).rows(record._replace(fields=pair), Losses()))
