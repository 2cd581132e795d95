"""Rows of a run on plain text: what they hold, that they are the same wherever tokens lie on disk,
and that tokens are made once and never held."""

import os
import time
import tracemalloc
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import datasets.config
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from longctx_patch.data import pack_rows
from longctx_patch.recipes import text_rows
from longctx_patch.recipes.data import text_reading, token_table
from longctx_patch.recipes.data.text_reading import TextReading, tokens_of
from longctx_patch.recipes.models import byte_tokenizer
from longctx_patch.recipes.text_rows import (
    TextRows,
    joined_rows,
    packed_rows,
    single_rows,
)
from longctx_patch.recipes.text_sources import stream_of
from tests.harness import run_distributed
from tests.recipes.conftest import write_records

EOS = 256
AWKWARD = ["a" * n for n in (3, 1, 13, 64, 1, 2, 31, 127, 5, 63, 8)]
Cut = Callable[..., TextRows]


class Made:
    """Makes rows of texts, which it writes into a file for each call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def __call__(self, cut: Cut, texts: list[str], seq_len: int = 4) -> TextRows:
        self.number += 1
        records = ({"text": text} for text in texts)
        path = write_records(self.folder / f"{self.number}.jsonl", records)
        return cut(stream_of([str(path)], TextReading(byte_tokenizer())), seq_len)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def decoded(rows: TextRows) -> list[str]:
    return [byte_tokenizer().decode(row["input_ids"]) for row in rows]


def test_rows_of_the_joined_stream(made: Made) -> None:
    rows = made(joined_rows, ["abc", "defgh", "i"])
    assert decoded(rows) == ["abc<eos>", "defg", "h<eos>i<eos>"]
    assert len(made(joined_rows, ["abc", "defgh", "ij"])) == 3  # the incomplete last row is dropped
    with pytest.raises(ValueError, match="3 tokens, less than one row of seq_len=4"):
        made(joined_rows, ["ab"])


def test_one_document_per_row(made: Made) -> None:
    rows = made(single_rows, ["ab", "cdefg", "hij", "klmn"])
    assert decoded(rows) == ["ab<eos>", "cdef", "g<eos>", "hij<eos>", "klmn"]  # no lone <eos>


def test_packed_rows_hold_whole_documents_or_pieces_of_long_ones(made: Made) -> None:
    packed = made(packed_rows, ["abc", "defghijklmnop", "q", "rs"], 8)
    parts = [
        byte_tokenizer().decode(part)
        for row in packed
        for part in np.split(row["input_ids"], np.cumsum(row["seq_lengths"])[:-1])
    ]
    assert sorted(parts) == ["abc<eos>", "defghijk", "lmnop<eos>", "q<eos>", "rs<eos>"]
    assert all(len(row["input_ids"]) <= 8 for row in packed)
    assert packed.lengths().tolist() == [len(row["input_ids"]) for row in packed]
    assert packed.efficiency == 23 / 24
    said = "packed 4 documents into 3 rows, 95.8% full; longer than a row, so split: 1"
    assert packed.summary == said
    called = {packed.called(row).partition(" (")[2] for row in range(3)}
    assert called == {"document 1)", "documents 1, 2)", "documents 0, 3)"}


def test_a_packed_row_with_nothing_to_learn_is_left_out(made: Made) -> None:
    packed = made(packed_rows, ["abcd"])  # the rest is a lone <eos>
    assert [row["seq_lengths"] for row in packed] == [[4]]
    with pytest.raises(ValueError, match="only empty documents"):
        made(packed_rows, [""])


@pytest.mark.parametrize("seq_len", [2, 7, 64])
@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_rows_are_those_of_tokens_held_in_memory(
    made: Made, seq_len: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are several rows of the table, and its chunks end anywhere."""
    monkeypatch.setattr(text_reading, "PIECE_TOKENS", piece)
    monkeypatch.setattr(text_reading, "BATCH_CHARACTERS", 20 * piece)
    monkeypatch.setattr(token_table, "CHUNK_TOKENS", 11)
    documents = [ids.tolist() for ids in tokens_of(AWKWARD, byte_tokenizer())]
    joined = list(chain(*documents))
    cut = [joined[n : n + seq_len] for n in range(0, len(joined) - seq_len + 1, seq_len)]
    assert [row["input_ids"] for row in made(joined_rows, AWKWARD, seq_len)] == cut
    pieces = [d[n : n + seq_len] for d in documents for n in range(0, len(d), seq_len)]
    single = [each for each in pieces if len(each) > 1]
    assert [row["input_ids"] for row in made(single_rows, AWKWARD, seq_len)] == single
    packed = pack_rows([{"input_ids": d} for d in documents], seq_len, too_long="split")
    assert list(made(packed_rows, AWKWARD, seq_len)) == [
        {"input_ids": row["input_ids"].tolist(), "seq_lengths": row["seq_lengths"]}
        for row in packed
        if max(row["seq_lengths"]) > 1
    ]


def test_digest_sees_tokens_and_cuts(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "same": made(joined_rows, ["abcdefg"]),
        "cut": made(joined_rows, ["abcdefg"], 2),
        "token": made(joined_rows, ["abcdefh"]),
        "packed": made(packed_rows, ["abcdefg"]),
        "documents": made(packed_rows, ["abc", "efg"]),
    }
    digests = {name: rows.digest() for name, rows in found.items()}
    assert len(set(digests.values())) == 5
    monkeypatch.setattr(token_table, "CHUNK_ROWS", 1)  # stored in another way, under another name
    assert made(joined_rows, ["abcdefg"]).digest() == digests["same"]


def test_a_source_that_stands_twice_and_an_empty_one(made: Made, tmp_path: Path) -> None:
    made(joined_rows, ["abc"])
    (tmp_path / "empty.txt").write_text("")
    sources = [str(tmp_path / name) for name in ("1.jsonl", "empty.txt", "1.jsonl")]
    rows = joined_rows(stream_of(sources, TextReading(byte_tokenizer())), 8)
    assert decoded(rows) == ["abc<eos>abc<eos>"]
    assert rows.digest() == made(joined_rows, ["abc", "abc"], 8).digest()


def test_tokens_stay_on_disk(made: Made) -> None:
    """What is allocated for rows of 4 MB of tokens, and for one of them, is far below."""
    texts = ["a" * 9999] * 100
    for cut in (joined_rows, single_rows, packed_rows):
        rows = made(cut, texts, 1000)  # the table is made
        before = pa.total_allocated_bytes()
        tracemalloc.start()
        again = cut(stream_of([str(made.folder / f"{made.number}.jsonl")], reading()), 1000)
        assert len(again[3]["input_ids"]) == 1000
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert again.digest() == rows.digest()
        most += pa.total_allocated_bytes() - before
        assert most < 1_000_000, f"{most} bytes for {again.num_tokens} tokens"


def reading() -> TextReading:
    return TextReading(byte_tokenizer())


def test_bytes_go_there_and_back() -> None:
    tokenizer = byte_tokenizer()
    text = "tabs\tand  spaces\r\nü中🙂"
    ids: Any = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, EOS, EOS + 1)


def packs(rank: int, source: str, seq_len: int, cache: str, calls: str) -> list[Any]:
    """The rows as a process sees them, which leaves a file for each time that it packs."""
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    pack = text_rows.pack_lengths

    def counted(*given: Any) -> Any:
        Path(calls, f"{os.getpid()}_{seq_len}_{time.monotonic_ns()}").touch()
        return pack(*given)

    text_rows.pack_lengths = counted  # type: ignore[assignment]
    rows = packed_rows(stream_of([source], TextReading(byte_tokenizer())), seq_len)
    assert isinstance(rows.pieces.starts, np.memmap)
    assert isinstance(rows.edges, np.memmap)
    return [*rows, rows.digest(), rows.summary]


def test_one_process_packs_for_all(made: Made, tmp_path: Path) -> None:
    """Each did, and each run again. A file that was cut off is made anew."""
    made(single_rows, AWKWARD)
    calls, source = tmp_path / "calls", str(made.folder / "1.jsonl")
    calls.mkdir()
    given = (source, 16, str(tmp_path / "shared"), str(calls))
    first, other = run_distributed(packs, 2, *given)
    assert first == other
    assert len([*calls.iterdir()]) == 1
    assert run_distributed(packs, 1, *given) == [first]
    assert len([*calls.iterdir()]) == 1
    (file,) = (tmp_path / "shared").rglob("edges.npy")
    file.write_bytes(file.read_bytes()[:-3])
    assert run_distributed(packs, 1, *given) == [first]
    assert len([*calls.iterdir()]) == 2
    assert run_distributed(packs, 1, source, 8, *given[2:]) != [first]
    assert len([*calls.iterdir()]) == 3
