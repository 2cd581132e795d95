"""Sources of text, rows of tokens, and the order in which replicas take them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longctx_patch.recipes.models import byte_tokenizer
from longctx_patch.recipes.packed import pack_documents
from longctx_patch.recipes.texts import RowOrder, digest, read_documents, token_rows

EOS = 256


def documents(*sources: Path | str) -> list[str]:
    return list(read_documents([str(source) for source in sources], "text"))


def rows_of(texts: list[str], **changes: Any) -> list[np.ndarray]:
    options = {"seq_len": 4, "one_document_per_row": False, **changes}
    return token_rows(texts, byte_tokenizer(), **options)


def test_files_folders_and_globs_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.md", ".hidden", "empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name == "empty.txt" else name)
    assert documents(tmp_path) == ["a.txt", "b.txt", "deep/c.md"]
    assert documents(f"{tmp_path}/*.txt") == ["a.txt", "b.txt"]
    assert documents(tmp_path / "b.txt", tmp_path / "a.txt") == ["b.txt", "a.txt"]


def test_jsonl_and_its_field(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n')
    assert documents(file) == ["one", "two"]
    for record, message in (
        ({"body": "two"}, r"line 2.*'text', there is: body.*for example --text-field body"),
        ({"messages": [{"role": "user"}]}, "there is: messages. This recipe trains on plain text"),
        ({"input_ids": [1]}, "there is: input_ids. .*longctx_patch.recipes.sft"),
        ({"text": 1}, "there is: text. None of them holds text"),
        ([], "a list, not an object with the field 'text'"),
    ):
        file.write_text('{"text": "one"}\n' + json.dumps(record))
        with pytest.raises(ValueError, match=message):
            documents(file)


def test_datasets_saved_to_disk_and_as_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": ["one", "two"]})
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    dataset.to_parquet(tmp_path / "files" / "train.parquet")
    for name in ("saved", "splits", "files", "files/train.parquet", "files/*.parquet"):
        assert documents(tmp_path / name) == ["one", "two"]


def test_nothing_found_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no text found.*none\.txt"):
        documents(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="no text found"):
        documents(tmp_path)
    with pytest.raises(ValueError, match="only empty documents"):
        rows_of([])
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"image\.png is not UTF-8 text"):
        documents(tmp_path)


def test_rows_of_the_joined_stream() -> None:
    rows = rows_of(["abc", "defgh", "i"])
    decoded = [byte_tokenizer().decode(row) for row in rows]
    assert decoded == ["abc<eos>", "defg", "h<eos>i<eos>"]
    assert all(row.dtype == np.int32 for row in rows)
    assert len(rows_of(["abc", "defgh", "ij"])) == 3  # the incomplete last row is dropped
    with pytest.raises(ValueError, match="3 tokens, less than one row of seq_len=4"):
        rows_of(["ab"])


def test_one_document_per_row() -> None:
    rows = rows_of(["ab", "cdefg", "hij", "klmn"], one_document_per_row=True)
    decoded = [byte_tokenizer().decode(row) for row in rows]
    assert decoded == ["ab<eos>", "cdef", "g<eos>", "hij<eos>", "klmn"]  # a lone <eos> is no row


def test_packed_rows_hold_whole_documents_or_pieces_of_long_ones() -> None:
    packed = pack_documents(["abc", "defghijklmnop", "q", "rs"], byte_tokenizer(), seq_len=8)
    decoded = [
        [byte_tokenizer().decode(part) for part in np.split(row, np.cumsum(lengths)[:-1])]
        for row, lengths in zip(packed.rows, packed.seq_lengths, strict=True)
    ]
    assert sorted(part for row in decoded for part in row) == [
        *("abc<eos>", "defghijk", "lmnop<eos>", "q<eos>", "rs<eos>"),
    ]
    assert all(row.dtype == np.int32 and len(row) <= 8 for row in packed.rows)
    assert packed.efficiency == 23 / 24
    said = "packed 4 documents into 3 rows, 95.8% full; longer than a row, so split: 1"
    assert packed.summary == said


def test_a_packed_row_with_nothing_to_learn_is_left_out() -> None:
    packed = pack_documents(["abcd"], byte_tokenizer(), seq_len=4)  # the rest is a lone <eos>
    assert packed.seq_lengths == [[4]]
    with pytest.raises(ValueError, match="only empty documents"):
        pack_documents([], byte_tokenizer(), seq_len=4)


def test_bytes_go_there_and_back() -> None:
    tokenizer = byte_tokenizer()
    text = "tabs\tand  spaces\r\nü中🙂"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, EOS, EOS + 1)


def test_each_pass_takes_every_row_once_in_another_order() -> None:
    rows = [np.array([number, number], dtype=np.int32) for number in range(7)]
    order = RowOrder(rows=rows, replicas=1, batch_size=1, accumulation=1, seed=3)
    taken = [order.micro_batches(step, 0)[0][0]["input_ids"][0] for step in range(14)]
    assert sorted(taken[:7]) == sorted(taken[7:]) == list(range(7))
    assert taken[:7] != taken[7:]


def test_digest_sees_tokens_and_cuts() -> None:
    whole, cut = rows_of(["abcdefg"]), rows_of(["abcdefg"], seq_len=2)
    assert digest(whole) == digest(rows_of(["abcdefg"]))
    assert len({digest(whole), digest(cut), digest(rows_of(["abcdefh"]))}) == 3
    lengths = [[4], [1, 3], [2, 2]]
    assert len({digest(whole, [of_row, [4]]) for of_row in lengths}) == 3
