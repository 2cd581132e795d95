"""The assistant's turns are learned under templates without marks, token by token as written down
here by hand, or a record is refused with what differs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from longctx_patch.recipes.data.conversations import Template
from longctx_patch.recipes.data.records import BadRecord, Record

TEMPLATES = Path(__file__).parent / "templates"
SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
)
PIECES = r"\n+|\w+|[^\w\n]"
"""Newlines merge into one token, and so may those of a message with those before it."""
FAMILIES = {  # beginning and end of texts
    "smollm2": ("<|im_start|>", "<|im_end|>"),
    "qwen2_5": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "llama3_1": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "gemma3": ("<bos>", "<end_of_turn>"),
    "gpt_oss": ("<|start|>", "<|return|>"),
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEARNED = re.compile(r"⟦(.*?)⟧", re.DOTALL)


def said(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role} | ({} if content is None else {"content": content}) | more


def call(**arguments: str) -> dict[str, Any]:
    function = {"name": "find", "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": function}


TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}
TWO_TURNS = [
    said("user", "One?"),
    said("assistant", "First."),
    said("user", "Two?"),
    said("assistant", "Second\nline."),
]
THINKING = [
    said("user", "One?"),
    said("assistant", "First."),
    said("user", "Two?"),
    said("assistant", "Second.", reasoning_content="so", thinking="so"),
]
CALLING = [
    said("user", "One?"),
    said("assistant", "", tool_calls=[call(word="one")]),
    said("tool", "found", tool_call_id="abcdefghi"),
    said("assistant", "First."),
    said("user", "Two?"),
    said("assistant", "Second."),
]
SPOKEN = [said("system", "Be brief."), *TWO_TURNS]
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "two of the assistant in a row, and a question that nobody answers": (
        "smollm2",
        {
            "messages": [
                said("system", "S"),
                said("user", "One?"),
                said("assistant", " First "),
                said("assistant", "Second."),
                said("user", "Three?"),
            ]
        },
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
        "⟦ First <|im_end|>\n⟧<|im_start|>assistant\n⟦Second.<|im_end|>\n⟧"
        "<|im_start|>user\nThree?<|im_end|>\n",
    ),
    "Qwen2.5 with tools": (
        "qwen2_5",
        {"messages": CALLING, "tools": [TOOL]},
        "<|im_start|>system\nYou are Qwen.\n\n# Tools\n<tools>\n" + json.dumps(TOOL) + "\n</tools>"
        "<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>\n"
        '{"name": "find", "arguments": {"word": "one"}}\n</tool_call><|im_end|>\n⟧'
        "<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦First.<|im_end|>\n⟧<|im_start|>user\nTwo?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Second.<|im_end|>\n⟧",
    ),
    "Qwen3 that thinks": (
        "qwen3",
        {"messages": THINKING},
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦First.<|im_end|>\n⟧"
        "<|im_start|>user\nTwo?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nso\n</think>\n\nSecond.<|im_end|>\n⟧",
    ),
    "Qwen3 that is told not to think": (
        "qwen3",
        {"messages": TWO_TURNS[:2], "chat_template_kwargs": {"enable_thinking": False}},
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "⟦First.<|im_end|>\n⟧",
    ),
    "Qwen3 with tools": (
        "qwen3",
        {"messages": CALLING, "tools": json.dumps([TOOL])},
        "<|im_start|>system\n# Tools\n<tools>\n" + json.dumps(TOOL) + "\n</tools><|im_end|>\n"
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>\n"
        '{"name": "find", "arguments": {"word": "one"}}\n</tool_call><|im_end|>\n⟧'
        "<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦First.<|im_end|>\n⟧<|im_start|>user\nTwo?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nSecond.<|im_end|>\n⟧",
    ),
    "Llama 3.1": (
        "llama3_1",
        {"messages": [said("system", " Be brief. "), *CALLING], "tools": [TOOL]},
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
        "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions:\n\n"
        + json.dumps(TOOL)
        + "\n\nOne?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦{"name": "find", "parameters": {"word": "one"}}<|eot_id|>⟧'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"found"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦First.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Second.<|eot_id|>⟧",
    ),
    "Mistral": (
        "mistral",
        {"messages": [said("user", "One?"), said("assistant", " First. "), *TWO_TURNS[2:]]},
        "<s>[INST] One?[/INST]⟦ First.</s>⟧[INST] Two?[/INST]⟦ Second\nline.</s>⟧",
    ),
    "Mistral with tools": (
        "mistral",
        {"messages": CALLING[:4], "tools": [TOOL]},
        "<s>[AVAILABLE_TOOLS] [" + json.dumps(TOOL) + "][/AVAILABLE_TOOLS][INST] One?[/INST]"
        '⟦[TOOL_CALLS] [{"name": "find", "arguments": {"word": "one"}, "id": "abcdefghi"}]</s>⟧'
        '[TOOL_RESULTS] {"content": found, "call_id": "abcdefghi"}[/TOOL_RESULTS]⟦ First.</s>⟧',
    ),
    "Gemma 3": (
        "gemma3",
        {"messages": [said("system", "Be brief."), said("user", "One?"), *TWO_TURNS[1:]]},
        "<bos><start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>\n<start_of_turn>model\n"
        "⟦First.<end_of_turn>\n⟧<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n"
        "⟦Second\nline.<end_of_turn>\n⟧",
    ),
    "gpt-oss, whose last turn ends with another token": (
        "gpt_oss",
        {"messages": THINKING},
        "<|start|>system<|message|>You are ChatGPT.<|end|><|start|>user<|message|>One?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>First.<|end|>⟧"
        "<|start|>user<|message|>Two?<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>so<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Second.<|return|>⟧",
    ),
    "gpt-oss with tools": (
        "gpt_oss",
        {"messages": [said("developer", "Be brief."), *CALLING], "tools": [TOOL]},
        "<|start|>system<|message|>You are ChatGPT.<|end|>"
        "<|start|>developer<|message|>Be brief.type find<|end|>"
        "<|start|>user<|message|>One?<|end|>"
        "<|start|>assistant⟦ to=functions.find<|channel|>commentary json<|message|>"
        '{"word": "one"}<|call|>⟧'
        '<|start|>functions.find to=assistant<|channel|>commentary<|message|>"found"<|end|>'
        "<|start|>assistant⟦<|channel|>final<|message|>First.<|end|>⟧"
        "<|start|>user<|message|>Two?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Second.<|return|>⟧",
    ),
}


def template_of(family: str, text: str | None = None) -> Template:
    """Makes a tokenizer of the words of the texts above; `text` is its template if given."""
    texts = [LEARNED.sub(r"\1", text) for _, _, text in CASES.values()]
    words = {piece for text in texts for piece in re.findall(PIECES, text)}
    ids = {word: n for n, word in enumerate(["<unk>", *sorted(words)])}
    model = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    model.pre_tokenizer = Split(Regex(PIECES), "isolated")
    bos, eos = FAMILIES[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token=bos, eos_token=eos, unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    tokenizer.chat_template = text or (TEMPLATES / f"{family}.jinja").read_text()
    return Template.of(tokenizer, assistant_only=True)


def by_hand(text: str) -> list[tuple[str, bool]]:
    """(token, whether it is learned) of a text in which what is learned stands in brackets."""
    pieces = "|".join([*map(re.escape, SPECIALS), PIECES])
    parts = ((part, n % 2 == 1) for n, part in enumerate(LEARNED.split(text)))
    return [(piece, learned) for part, learned in parts for piece in re.findall(pieces, part)]


@pytest.mark.parametrize("name", CASES)
def test_the_turns_of_published_templates(name: str) -> None:
    family, fields, wanted = CASES[name]
    template = template_of(family)
    ids, learned = template.tokens(Record(fields, "a.jsonl, line 1"), fields["messages"])
    assert template.marks == "none"
    tokens = template.tokenizer.convert_ids_to_tokens(ids)
    assert list(zip(tokens, learned, strict=True)) == by_hand(wanted)


def test_an_end_that_conversations_alone_have() -> None:
    """As that of Phi-3, whose text ends with another token than its turns."""
    ended = CHATML + "{% if not add_generation_prompt %}</s>{% endif %}"
    template = template_of("mistral", ended)
    ids, learned = template.tokens(Record({}, "line 1"), TWO_TURNS)
    tokens = template.tokenizer.convert_ids_to_tokens(ids)
    assert list(zip(tokens, learned, strict=True)) == by_hand(
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦First.<|im_end|>\n⟧"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n⟦Second\nline.<|im_end|>\n</s>⟧"
    )


COUNTED = "{% if messages | length > 2 %}More{% endif %}" + CHATML
UNFOUND: dict[str, tuple[str, str | None, dict[str, Any], str]] = {
    "newlines that merge": (
        "smollm2",
        CHATML,
        {"messages": [*TWO_TURNS[:3], said("assistant", "\nSecond.")]},
        r"message 4 is not found: tokens merge across its border: the text before it ends in "
        r"\['<\|im_start\|>', 'assistant', '\\n'\], .* has \['assistant', '\\n\\n', 'Second'\]",
    ),
    "another beginning": (
        "smollm2",
        COUNTED,
        {"messages": TWO_TURNS},
        r"message 2 is not found: asked for it, the template writes '<\|im_start\|>user.*"
        r"and in the whole conversation 'More<\|im_start\|>user",
    ),
    "tools that Mistral puts before the last question": (
        "mistral",
        None,
        {"messages": TWO_TURNS, "tools": [TOOL]},
        r"message 2 .* writes '<s>\[AVAILABLE_TOOLS\] .* the whole conversation '<s>\[INST\] One",
    ),
    "turns that begin with what was to end them": (
        "mistral",
        CHATML.replace(
            "<|im_end|>\n{% endfor %}",
            "{% if loop.last and m.role == 'assistant' %}</s>{% endif %}{% endfor %}",
        ),
        {"messages": TWO_TURNS},
        r"message 2 .* where it is the last turn, the template writes 'nt\\nFirst.</s>', and in "
        r"the whole conversation 'nt\\nFirst.<\|im_start\|>user",
    ),
    "nothing before it": (
        "qwen2_5",
        None,
        {"messages": TWO_TURNS[1:]},
        "message 1 is not found: the chat template refuses it",
    ),
}


@pytest.mark.parametrize("name", UNFOUND)
def test_turns_that_are_not_found(name: str) -> None:
    family, text, fields, message = UNFOUND[name]
    template = template_of(family, text)
    with pytest.raises(
        BadRecord, match=r"(?s)^a.jsonl, line 1: the assistant's turn in " + message
    ):
        template.tokens(Record(fields, "a.jsonl, line 1"), fields["messages"])
