"""Documents of every source, what is refused, and that several processes tokenise them once."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from longctx_patch.recipes.data import readers, text_reading, windows
from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.records import BadRecord
from longctx_patch.recipes.data.text_reading import TextReading, documents_of, tokens_of
from longctx_patch.recipes.models import byte_tokenizer
from longctx_patch.recipes.text_rows import joined_rows
from longctx_patch.recipes.text_sources import stream_of
from longctx_patch.transport.processes import run_processes
from tests.recipes.conftest import write_records


def documents(*sources: Path | str) -> list[str]:
    return list(documents_of([str(source) for source in sources], "text"))


def test_jsonl_and_its_field(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n')
    assert documents(file) == ["one", "two"]
    for record, message in (
        ({"body": "two"}, r"line 2.*'text', there is: body.*for example --text-field body"),
        ({"messages": [{"role": "user"}]}, "there is: messages. This recipe trains on plain text"),
        ({"input_ids": [1]}, "there is: input_ids. .*longctx_patch.recipes.sft"),
        ({"text": 1}, "the field 'text' is 1 .a int., not a text"),
        ({"text": None}, "line 2: the field 'text' is null, not a text. Give each record a text"),
        ([], "a list, not an object with named fields"),
    ):
        file.write_text('{"text": "one"}\n' + json.dumps(record))
        with pytest.raises(BadRecord, match=message):
            documents(file)
        with pytest.raises(BadRecord, match=message):
            stream_of([str(file)], TextReading(byte_tokenizer()))


class CountingTokenizer:
    """Bytes; each document is a line in a file."""

    eos_token_id = 256
    chat_template = None
    special_tokens_map: dict[str, str]

    def __init__(self, log: Path) -> None:
        self.log, self.special_tokens_map = log, {}

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        with self.log.open("a") as log:
            log.write(f"{os.getpid()}\n" * len(texts))
        return {"input_ids": [list(text.encode()) for text in texts]}


def read_rows(_: int, source: str, folder: Path) -> np.ndarray:
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    rows = joined_rows(stream_of([source], TextReading(CountingTokenizer(folder / "calls"))), 7)
    return np.array([row["input_ids"] for row in rows])


def test_one_process_tokenises_for_all(tmp_path: Path) -> None:
    """Processes that start together call the tokenizer once for each document, and a later run not
    at all; all have the same rows."""
    texts = [f"document {number} " * (number % 7 + 1) for number in range(60)]
    source = write_records(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    joined = [i for text in texts for i in (*text.encode(), 256)]
    wanted = np.array(joined[: len(joined) // 7 * 7]).reshape(-1, 7)
    for processes in (3, 1):
        for found in run_processes(read_rows, processes, str(source), tmp_path, timeout_s=120):
            assert np.array_equal(found, wanted)
        assert len((tmp_path / "calls").read_text().split()) == len(texts)


def test_a_long_document_is_tokenised_by_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer never gets more than a window of it, and makes the same tokens."""
    sizes, asked = list[int](), byte_tokenizer()

    class Recording:
        is_fast, eos_token_id = True, asked.eos_token_id

        def __call__(self, text: Any, **options: Any) -> Any:
            sizes.append(len(text) if isinstance(text, str) else max(map(len, text)))
            return asked(text, **options)

    texts = ["short", "a longer text, äöü " * 500, "b"]
    wanted = tokens_of(texts, asked)
    monkeypatch.setattr(text_reading, "WINDOW", 900)
    monkeypatch.setattr(windows, "WINDOW", 900)
    monkeypatch.setattr(windows, "OVERLAP", 300)
    assert all(map(np.array_equal, tokens_of(texts, Recording()), wanted))
    assert max(sizes) == 900


def test_a_line_that_is_too_long_to_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MOST_LINE_BYTES", 1000)
    file = write_records(tmp_path / "a.jsonl", ({"text": "a" * size} for size in (980, 1200)))
    with pytest.raises(BadRecord, match=r"a.jsonl, line 2: it has more than 1,000 bytes .*2,2"):
        stream_of([str(file)], TextReading(byte_tokenizer()))


def test_long_documents_are_pieces_that_say_where_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_reading, "PIECE_TOKENS", 4)
    made = text_reading.Record({"text": "abcdefghijk"}, "here")
    rows = list(TextReading(byte_tokenizer()).rows_of([made], Losses()))
    assert [len(row["input_ids"]) for row in rows] == [4, 4, 4]
    assert [row["ends"] for row in rows] == [False, False, True]
    assert len({row["digest"] for row in rows}) == 3
