"""Records become the rows that TRL makes of them; of chats exactly the assistant's turns are
learned; records that can't be trained on are refused by file and row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from longctx_patch.recipes.data.conversations import Template
from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.reading import Reading
from longctx_patch.recipes.data.records import BadRecord, Record
from longctx_patch.recipes.data.token_table import table_of
from tests.hf.tiny import featured_model
from tests.trl.cases import rows, tokenizer

WHOLE = 1000
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant> {% generation %}"
    "{{ m.content }} <eos>{% endgeneration %} {% elif m.role in ('user', 'tool') %}<user> "
    "{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def words(template: str | None = CHAT) -> Any:
    found = tokenizer()
    found.add_special_tokens({"additional_special_tokens": ["<assistant>"]})
    found.chat_template = template
    return found


def read(
    reading: Reading, *records: dict[str, Any], losses: Losses | None = None
) -> list[dict[str, Any]]:
    named = (Record(fields, f"a.jsonl, line {n}") for n, fields in enumerate(records, start=1))
    return list(reading.rows_of(named, losses or Losses()))


def chats(kind: str) -> list[dict[str, Any]]:
    """Records whose prompts and answers are lists of messages."""

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text.strip()}]

    answers = ("completion", "chosen", "rejected")
    return [
        {"prompt": said("user", record["prompt"])}
        | {name: said("assistant", record[name]) for name in answers if name in record}
        for record in rows(kind, 8, 3)
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own defaults
@pytest.mark.parametrize(
    ("records", "kind", "given"),
    [
        (rows("text", 8, 3), "text", {}),
        (rows("chat", 8, 3), "chat", {}),
        (rows("chat", 8, 3), "chat", {"assistant_only_loss": True}),
        (rows("completion", 8, 3), "completion", {}),
        (rows("completion", 8, 3), "completion", {"completion_only_loss": False}),
        (chats("completion"), "completion", {}),
        (chats("completion"), "completion", {"assistant_only_loss": True}),
    ],
)
def test_rows_are_those_of_trl(
    tmp_path: Path, records: list[dict[str, Any]], kind: Any, given: dict[str, Any]
) -> None:
    trainer = SFTTrainer(
        model=featured_model("llama"),
        args=SFTConfig(
            str(tmp_path), use_cpu=True, bf16=False, max_length=None, report_to=[], **given
        ),
        train_dataset=Dataset.from_list(records),
        processing_class=words(),
    )
    reading = Reading(
        words(),
        kind,
        WHOLE,
        assistant_only=given.get("assistant_only_loss", False),
        completion_only=given.get("completion_only_loss", True),
    )
    wanted = [
        {name: row[name] for name in ("input_ids", "labels")} for row in trainer.train_dataset
    ]
    found = read(reading, *records)
    assert found == wanted


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("records", [rows("pairs", 8, 3), chats("pairs")])
def test_pairs_are_those_of_trl(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    trainer = DPOTrainer(
        model=featured_model("llama"),
        ref_model=featured_model("llama"),
        args=DPOConfig(str(tmp_path), use_cpu=True, bf16=False, max_length=None, report_to=[]),
        train_dataset=Dataset.from_list(records),
        processing_class=words(),
    )
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    wanted = [{name: row[name] for name in names} for row in trainer.train_dataset]
    found = read(Reading(words(), "preference", WHOLE), *records)
    assert found == wanted


def test_exactly_the_turns_of_the_assistant_are_learned() -> None:
    """Each of their words and the end of each turn, token by token; also where a turn ends with a
    space that belongs to no token."""
    for template in (CHAT, CHAT.replace("<eos>{% endgeneration %} ", "<eos> {% endgeneration %}")):
        read_by = words(template)
        (row,) = read(
            Reading(read_by, "chat", WHOLE, assistant_only=True),
            {
                "messages": [
                    {"role": "user", "content": "w1 w2"},
                    {"role": "assistant", "content": "w3"},
                    {"role": "tool", "content": "w4"},
                    {"role": "assistant", "content": "w5 w1"},
                ]
            },
        )
        tokens = read_by.convert_ids_to_tokens(row["input_ids"])
        learned = [
            token if label >= 0 else "" for token, label in zip(tokens, row["labels"], strict=True)
        ]
        assert " ".join(tokens) == (
            "<user> w1 w2 <assistant> w3 <eos> <user> w4 <assistant> w5 w1 <eos>"
        )
        assert learned == ["", "", "", "", "w3", "<eos>", "", "", "", "w5", "w1", "<eos>"]


def test_tools_and_options_reach_the_template() -> None:
    template = "{% for t in tools %}{{ t.name }} {% endfor %}{{ mood }} " + CHAT
    record = {
        "messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}],
        "tools": '[{"name": "w7"}]',
        "chat_template_kwargs": {"mood": "w8"},
    }
    (row,) = read(Reading(words(template), "chat", WHOLE), record)
    text = words().decode(row["input_ids"])
    assert text == "w7 w8 <user> w1 <assistant> w2 <eos>"


def test_empty_texts_are_no_documents() -> None:
    found = read(reading("text"), {"text": ""}, {"text": "w1"}, {"": ""})
    assert [len(row["input_ids"]) for row in found] == [2]


def test_older_names_of_messages() -> None:
    older = {
        "conversations": [{"from": "user", "value": "w1"}, {"from": "assistant", "value": "w2"}]
    }
    newer = {
        "messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    }
    reading = Reading(words(), "chat", WHOLE, assistant_only=True)
    assert read(reading, older) == read(reading, newer)
    names = [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2", "weight": None}]
    sharegpt = {"conversations": names, "system": ""}
    newer["messages"][0]["train"] = False  # type: ignore[assignment]  # as it is
    newer["messages"][1]["weight"] = 1  # type: ignore[assignment]
    assert read(reading, sharegpt) == read(reading, newer)
    chatml = CHAT.replace("('user', 'tool')", "('user', 'system')")
    reading = Reading(words(chatml), "chat", WHOLE, assistant_only=True)
    newer["messages"].insert(0, {"role": "system", "content": "w3"})
    assert read(reading, {**sharegpt, "system": "w3"}) == read(reading, newer)


@pytest.mark.parametrize(("too_long", "pieces"), [("cut", [10]), ("split", [10, 7])])
def test_long_records_as_asked(too_long: Any, pieces: list[int]) -> None:
    record = {"input_ids": list(range(17)), "labels": [-100, *range(1, 17)]}
    losses = Losses()
    found = read(Reading(words(), "tokens", 10, too_long), record, losses=losses)
    assert [len(row["input_ids"]) for row in found] == pieces
    for name, values in record.items():
        joined = [value for row in found for value in row[name]]
        assert joined == values[: sum(pieces)]
    said = "tokens of 1 records, 7 of them to be learned: what is beyond a row's end"
    facts = [(what, number, text[: len(said)]) for what, number, text in losses.facts()]
    assert facts == ([("cut off", "7", said)] if too_long == "cut" else [])


def test_rows_in_which_nothing_is_learned_are_left_out_and_counted() -> None:
    """A part of a long record; a label of a row's first token is nobody's prediction. A record
    without any other row is left out as a whole."""
    labels, losses = [-100] * 10 + [3] + [-100] * 9 + [3, 3], Losses()
    record = {"input_ids": [1] * 22, "labels": labels}
    found = read(Reading(words(), "tokens", 10, "split"), record, losses=losses)
    assert [row["labels"] for row in found] == [[3, 3]]
    (fact,) = losses.facts()
    assert fact[:2] == ("cut off", "20")
    assert fact[2].startswith("tokens of 1 records: pieces in which nothing is learned (too_long")
    losses = Losses()
    assert read(Reading(words(), "tokens", 10, "cut"), *[record] * 5, losses=losses) == []
    (fact,) = losses.facts()
    assert fact[:2] == ("left out", "5")
    assert fact[2] == (
        "of 5 records (110 tokens, 15 of them to be learned): nothing is learned in their first 10 "
        "tokens (too_long: cut); first: a.jsonl, line 1; a.jsonl, line 2; a.jsonl, line 3"
    )
    streamed = Losses(refuses=True)
    with pytest.raises(BadRecord, match=r"line 1: it would be left out of a stream.*allow-dropped"):
        read(Reading(words(), "tokens", 10, "cut"), record, losses=streamed)


def test_a_conversation_that_is_too_long_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx_patch.recipes.data.conversations.MOST_CHARACTERS", 50)
    chat = {"messages": [user("w1 " * 20), user("w2", "assistant")]}
    with pytest.raises(BadRecord, match=r"line 1: a conversation of \d+ characters, and 50 are"):
        read(Reading(words(), "chat", 100), chat)


def reading(kind: Any, **more: Any) -> Reading:
    return Reading(words(), kind, 10, **more)


def user(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


ANSWERED = [user("w1"), user("w2", "assistant")]
PARTS = [{"type": "text", "text": "w2"}]
ANY_ROLE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant> {% generation %}"
    "{{ m.content }} <eos>{% endgeneration %} {% else %}<{{ m.role }}> {{ m.content }} "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
CHATS, LEARNED = reading("chat"), reading("chat", assistant_only=True)
COMPLETIONS, PAIRS, TOKENS = (reading(kind) for kind in ("completion", "preference", "tokens"))


def of_any_role(kind: Any, **more: Any) -> Reading:
    return Reading(words(ANY_ROLE), kind, 100, **more)


def turn(**fields: Any) -> dict[str, Any]:
    """A chat whose last message, of the assistant, has these fields."""
    return {"messages": [user("w1"), {"role": "assistant", **fields}]}


ODD = user("w2", "asistant")
SHAREGPT = [{"from": "human", "value": "w1"}, {"from": "function_call", "value": ""}]
PICTURE = {"role": "user", "content": [{"type": "image"}]}
REFUSED: list[tuple[Reading, dict[str, Any], str]] = [
    (CHATS, {"text": "w1"}, r"a field of text, among those with `messages`"),
    (
        of_any_role("chat", assistant_only=True),
        {"messages": [*ANSWERED, user("w1"), ODD]},
        r"message 4 of messages has the role 'asistant', .* mean 'assistant'\?.*of system, dev",
    ),
    (
        of_any_role("preference"),
        {"chosen": ANSWERED, "rejected": [user("w1"), ODD]},
        "message 2 of rejected has the role 'asistant', which",
    ),
    (
        of_any_role("completion"),
        {"prompt": [user("w1")], "completion": [ODD]},
        "message 1 of completion has the role 'asistant', which",
    ),
    (LEARNED, turn(content="w2", weight=0), "has weight=0, .* Leave weight out"),
    (
        COMPLETIONS,
        {"prompt": ANSWERED[:1], "completion": [{**ANSWERED[1], "train": False}]},
        "message 1 of completion has train=False, ",
    ),
    (CHATS, {"conversations": SHAREGPT}, "2 of conversations is from 'function_call'"),
    (
        CHATS,
        {"messages": [user("w1"), user("w9", "robot"), *ANSWERED]},
        r"leaves out the message of role 'robot' that ends with 'w9'",
    ),
    (CHATS, {"messages": [{"content": "w1"}]}, "a message of messages has no role"),
    (CHATS, turn(content=None), "message 2 of messages, of role 'assistant', has no content"),
    (CHATS, turn(content=3.5), r"message 2 of messages: its content is 3.5 \(a float\)"),
    (CHATS, turn(content=PARTS), "the content of message 2 is a list of parts, and the"),
    (  # parts that are not printed, but joined
        Reading(words(CHAT.replace("m.content }}", "m.content + '' }}")), "chat", 100),
        {"messages": [{"role": "user", "content": PARTS}, ANSWERED[1]]},
        "the content of message 1 is a list of parts, .* Join the parts to one text",
    ),
    (CHATS, {"messages": [PICTURE, ANSWERED[1]]}, "it has 'image', and recipes train on text"),
    (CHATS, {"messages": ANSWERED, "images": ["a.png"]}, "it has 'images', and recipes train"),
    (CHATS, {"messages": []}, r"messages is '\[\]': give a list"),
    (LEARNED, {"messages": [user("w1")]}, "none of its 2 tokens is learned, since the ass"),
    (CHATS, {"messages": ANSWERED, "tools": "abc"}, "tools is 'abc', which is no JSON"),
    (CHATS, {"messages": ANSWERED, "tools": {"name": "add"}}, "tools is .*: give a list of tools"),
    (CHATS, turn(tool_calls="add"), "message 2 of messages: its tool_calls is 'add': give"),
    (PAIRS, {"prompt": "w1", "chosen": "w2"}, "it has 'chosen' and no 'rejected'"),
    (
        PAIRS,
        {"chosen": [user("w1"), *ANSWERED[1:]], "rejected": [user("w2"), *ANSWERED[1:]]},
        "chosen and rejected begin differently",
    ),
    (TOKENS, {"input_ids": [1, 2], "labels": [-100] * 2}, "since all its labels are -100. Leave"),
    (TOKENS, {"input_ids": [1, 2], "labels": [1, -100]}, "are -100 but that of the first, whi"),
    (reading("text"), {"text": "w1 " * 30}, "31 tokens, .* by the setting too_long: cut"),
    (
        PAIRS,
        {"prompt": "w1 " * 9, "chosen": "w1", "rejected": "w2 w2"},
        "12 tokens, .* a pair can't be cut",
    ),
    (COMPLETIONS, {"prompt": "w1", "completion": 3}, "must both be texts"),
    (
        reading("tokens", vocab_size=100),
        {"input_ids": [1, 2, 100], "labels": [1, 2, -100]},
        r"input_ids\[2\] is 100, and the model has",
    ),
    (TOKENS, {"input_ids": [1, 2, 3], "labels": [1, -1, 3]}, r"labels\[1\] is -1, and the model"),
    (reading("tokens", vocab_size=9), {"input_ids": [2**70, 1]}, r"input_ids\[0\] is 118"),
    (TOKENS, {"input_ids": [1, True]}, r"\[1\] is 'True' of type bool"),
    (TOKENS, {"input_ids": "1 2"}, "input_ids is '1 2': give a list"),
    (TOKENS, {"input_ids": [1, 2], "labels": [1]}, "1 labels for 2 input_ids"),
    (TOKENS, {"input_ids": [1]}, "none of its 1 tokens is learned"),
]


@pytest.mark.parametrize(("given", "record", "message"), REFUSED, ids=[r[2] for r in REFUSED])
def test_records_that_are_refused(given: Reading, record: dict[str, Any], message: str) -> None:
    good: dict[str, dict[str, Any]] = {
        "chat": {"messages": ANSWERED},
        "text": {"text": "w1"},
        "tokens": {"input_ids": [1, 2]},
        "completion": {"prompt": "w1", "completion": "w2"},
        "preference": {"prompt": "w1", "chosen": "w2", "rejected": "w3"},
    }
    with pytest.raises(BadRecord, match=f"a.jsonl, line 2: .*{message}"):
        read(given, good[given.kind], record)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "saved"])
def test_every_kind_of_file_names_the_record(tmp_path: Path, kind: str) -> None:
    """As the table of a run is made, by `datasets`, which raises an error of its own."""
    records = [{"messages": ANSWERED}] * 3 + [{"messages": [user("w1"), user("w9", "robot")]}]
    file = tmp_path / f"chats.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind == "json":
        file.write_text(json.dumps(records))
    elif kind == "parquet":
        Dataset.from_list(records).to_parquet(str(file))
    else:
        folder = file if kind == "saved" else tmp_path / "folder"
        Dataset.from_list(records).save_to_disk(str(folder))
        if kind == "arrow":
            next(folder.glob("*.arrow")).rename(file)
    what = "line" if kind == "jsonl" else "record"
    with pytest.raises(BadRecord, match=rf"chats.{kind}, {what} 4: .* message of role 'robot'"):
        table_of(str(file), Reading(words(), "chat", WHOLE))


def test_a_template_that_refuses_a_role() -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        BadRecord, match="line 1: the chat template refuses it: roles must alternate"
    ):
        read(Reading(words(refusing), "chat", WHOLE), {"messages": ANSWERED})


NO_MARKS = CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TEMPLATES: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: words(None), "no chat template.*--chat-template FILE"),
    "no marks, and no turns": (
        lambda: words("{{ messages | length }} " + NO_MARKS),
        r"message 2 is not found: asked .*Put \{% generation",
    ),
    "no Jinja": (
        lambda: words("{% for m in messages %}\n{{ m.content }}"),
        "no Jinja, in line 2: ",
    ),
    "no stop": (
        lambda: words(CHAT.replace("<eos>{% endgeneration %}", "{% endgeneration %}<eos>")),
        "would not learn to stop",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_are_refused(name: str) -> None:
    make, message = TEMPLATES[name]
    with pytest.raises(ValueError, match=message):
        Template.of(make(), assistant_only=True)
