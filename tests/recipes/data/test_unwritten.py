"""A record of which the chat template leaves out a field is refused with the field's name."""

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
