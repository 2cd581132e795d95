"""Packing puts every document whole into one row, within the row length, with little padding."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from longctx_patch import LongContextConfig, SequenceShardCollator
from longctx_patch.data.packing import PackedRow, best_fit, pack_rows

Row = dict[str, Any]


def rows_of(*lengths: int) -> list[Row]:
    """Documents whose tokens are all different, with labels that differ from them."""
    first, rows = 0, []
    for length in lengths:
        ids = list(range(first, first + length))
        rows.append({"input_ids": ids, "labels": [-token for token in ids]})
        first += length
    return rows


def log_normal(count: int) -> list[int]:
    draw = random.Random(0)
    return [min(4096, max(1, int(draw.lognormvariate(6, 1.2)))) for _ in range(count)]


def documents_of(packed: list[PackedRow], key: str = "input_ids") -> list[list[int]]:
    return [
        document.tolist()
        for row in packed
        for document in row[key].split(row["seq_lengths"])  # type: ignore[literal-required]
    ]


@given(st.lists(st.integers(1, 20)), st.integers(20, 40))
def test_best_fit_places_each_length_once(lengths: list[int], capacity: int) -> None:
    bins = best_fit(lengths, capacity)
    fills = [sum(lengths[index] for index in indices) for indices in bins]
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    assert max(fills, default=0) <= capacity
    assert list(bins) == sorted(bins)
    assert all(list(indices) == sorted(indices) for indices in bins)
    least_two = sorted(fills)[:2]
    assert len(fills) < 2 or sum(least_two) > capacity, "two bins that fit into one"


def test_best_fit_prefers_the_bin_with_least_room() -> None:
    # The 3 goes beside the 7, where it fills the bin, and not beside the 6.
    assert best_fit([6, 7, 3], 10) == ((0,), (1, 2))
    assert best_fit([], 10) == ()


@pytest.mark.parametrize("length", [0, -1, 11])
def test_best_fit_refuses_what_fits_no_bin(length: int) -> None:
    with pytest.raises(ValueError, match=rf"length {length} at index 1: .*lie in 1\.\.10"):
        best_fit([10, length], 10)


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(12, 30), st.integers(1, 4))
def test_every_document_comes_once_with_its_labels(
    lengths: list[int], seq_len: int, buffer_rows: int
) -> None:
    rows = rows_of(*lengths)
    packed = pack_rows(rows, seq_len, buffer_rows=buffer_rows)
    got = list(packed)
    assert all(0 < len(row["input_ids"]) <= seq_len for row in got)
    assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) for row in got)
    assert sorted(documents_of(got)) == [row["input_ids"] for row in rows if row["input_ids"]]
    assert all(torch.equal(row["labels"], -row["input_ids"]) for row in got)
    counts = (packed.num_rows, packed.num_tokens, packed.num_documents, packed.num_empty)
    empty = lengths.count(0)
    assert counts == (len(got), sum(lengths), len(lengths) - empty, empty)
    assert not got or packed.efficiency == sum(lengths) / (len(got) * seq_len)


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 15), st.integers(1, 3))
def test_split_documents_come_in_pieces(lengths: list[int], seq_len: int, buffer_rows: int) -> None:
    rows = rows_of(*lengths)
    packed = pack_rows(rows, seq_len, buffer_rows=buffer_rows, too_long="split")
    pieces = [
        row["input_ids"][start : start + seq_len]
        for row in rows
        for start in range(0, len(row["input_ids"]), seq_len)
    ]
    assert sorted(documents_of(list(packed))) == pieces
    assert packed.num_split == sum(length > seq_len for length in lengths)


def test_bad_rows_are_refused_by_their_number() -> None:
    with pytest.raises(ValueError, match="row 1 has text, which would be dropped"):
        list(pack_rows([{"input_ids": [1]}, {"input_ids": [1], "text": "a"}], 8))
    with pytest.raises(ValueError, match=r"row 0 has pixel_values, .* give the model whole rows"):
        list(pack_rows([{"input_ids": [1], "pixel_values": 0}], 8))
    with pytest.raises(ValueError, match=r"row 1 has a document of 9 tokens.*seq_len=8.*'split'"):
        list(pack_rows(rows_of(8, 9), 8))


def test_log_normal_documents_are_packed_tightly() -> None:
    packed = pack_rows(rows_of(*log_normal(500)), 8192, buffer_rows=4)
    assert sum(1 for _ in packed) > 25
    assert packed.efficiency >= 0.97


def test_documents_stay_near_their_place_in_the_stream() -> None:
    packed = list(pack_rows(rows_of(*[3, 5, 2, 4] * 50), 8, buffer_rows=2))
    firsts = [int(row["input_ids"][0]) for row in packed]
    reach = [max(firsts[: n + 1]) - firsts[n] for n in range(len(firsts))]
    assert max(reach) <= 4 * 8
    in_row = [documents_of([row]) for row in packed]
    assert all(documents == sorted(documents) for documents in in_row)


def test_padding_is_dropped_and_packed_rows_are_packed_anew() -> None:
    rows: list[Row] = [
        {"input_ids": [1, 2, 0, 0], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [3, 4, 5], "labels": None, "seq_lengths": [1, 2]},
    ]
    (row,) = pack_rows(rows, 8)
    assert row["input_ids"].tolist() == row["labels"].tolist() == [1, 2, 3, 4, 5]
    assert row["seq_lengths"] == [2, 1, 2]


def test_a_split_asks_for_no_label_across_the_cut() -> None:
    collate = SequenceShardCollator(LongContextConfig(), group_rank=0, pad_token_id=0, packed=True)
    packed = list(pack_rows(rows_of(6), 4, too_long="split"))
    assert [row["seq_lengths"] for row in packed] == [[4], [2]]
    assert collate(packed)["shift_labels"].tolist() == [[-1, -2, -3, -100, -5, -100]]


def test_a_list_can_be_read_again_and_an_iterator_cannot() -> None:
    packed = pack_rows(rows_of(3, 4, 5), 8)
    first, second = documents_of(list(packed)), documents_of(list(packed))
    assert first == second
    assert packed.num_documents == 3, "of one pass"
    stream: Iterator[Row] = iter(rows_of(3))
    packed = pack_rows(stream, 8)
    assert len(list(packed)) == 1
    with pytest.raises(ValueError, match="a second pass over rows of type list_iterator"):
        list(packed)


def test_rows_of_the_datasets_library() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(rows_of(3, 4, 5))
    want = documents_of(list(pack_rows(rows_of(3, 4, 5), 8)))
    assert documents_of(list(pack_rows(rows, 8))) == want
    assert documents_of(list(pack_rows(rows.to_iterable_dataset(), 8))) == want
    stored = datasets.Dataset.from_list([dict(row) for row in pack_rows(rows, 8)])
    assert documents_of(list(pack_rows(stored, 8))) == want, "packed rows can be stored"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_gives_every_row_once(num_workers: int) -> None:
    packed = pack_rows(rows_of(*[3, 4, 5] * 10), 8)
    collate = SequenceShardCollator(LongContextConfig(), group_rank=0, pad_token_id=0)
    loader = DataLoader(packed, batch_size=2, collate_fn=collate, num_workers=num_workers)
    tokens = [token for batch in loader for token in batch["input_ids"].flatten().tolist()]
    assert sorted(tokens) == list(range(120))


def test_several_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A DataLoader takes seconds to end failed workers, so this object stands in for one.
    worker = SimpleNamespace(id=0, num_workers=2)
    monkeypatch.setattr("longctx_patch.data.packing.get_worker_info", lambda: worker)
    with pytest.raises(ValueError, match=r"num_workers=2: .*Use num_workers=0 or 1"):
        list(pack_rows(rows_of(3, 4), 8))


def test_efficiency_of_nothing_is_refused() -> None:
    packed = pack_rows([], 8)
    assert list(packed) == []
    with pytest.raises(ValueError, match=r"efficiency of 0 rows.*num_workers=0"):
        _ = packed.efficiency


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 0}, "seq_len=0: it counts from 1"),
        ({"seq_len": 8, "buffer_rows": 0}, "buffer_rows=0: it counts from 1"),
        ({"seq_len": 8, "too_long": "drop"}, "too_long='drop': use one of refuse, split"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_rows([], **arguments)
