"""Rows that begin alike become one row, in which each has its own tokens, labels and sight."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longctx_patch.data.prefixes import Beginnings
from longctx_patch.data.rows import Row
from longctx_patch.data.stock_rows import StockModel
from longctx_patch.data.whole_rows import SharedTokens, WholeRows, read_rows
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import documents_mask
from longctx_patch.sequence.pairs import pairs_of

Ids = list[int]


def padded(rows: list[Ids], labels: list[Ids] | None = None, left: bool = False) -> WholeRows:
    longest = max(map(len, rows))

    def filled(parts: list[Ids], value: int) -> Tensor:
        rests = [[value] * (longest - len(part)) for part in parts]
        pairs = zip(rests, parts, strict=True) if left else zip(parts, rests, strict=True)
        return torch.tensor([[*one, *other] for one, other in pairs])

    batch: dict[str, Any] = {
        "input_ids": filled(rows, 0),
        "attention_mask": filled([[1] * len(row) for row in rows], 0),
        "labels": filled(labels or rows, -100),
    }
    if left:
        batch["labels"][batch["attention_mask"].cumsum(1) == 1] = -100
    return read_rows(batch, StockModel())


def join_alike(whole: WholeRows) -> tuple[Row, SharedTokens] | None:
    found = Beginnings.of(whole)
    return None if found is None else found.join()


# Few words and few beginnings, so that rows often begin alike, are equal, or go on from each other.
rows_alike = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(0, 1), min_size=1, max_size=6)).map(
        lambda made: [5, 6, 5, 7, 7, 8, 5, 6, 5, 7, 9, 9][: made[0]] + made[1]
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=150, deadline=None)
@given(rows_alike, st.booleans(), st.data())
def test_every_row_is_there_and_sees_itself_alone(
    rows: list[Ids], left: bool, data: st.DataObject
) -> None:
    masks = [data.draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))) for r in rows]
    labels = [
        [word if keeps else -100 for word, keeps in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]
    whole = padded(rows, labels, left)
    prefixes = {tuple(row[: end + 1]) for row in rows for end in range(1, len(row))}
    found = Beginnings.of(whole)
    if found is None:
        assert len(prefixes) == sum(len(row) - 1 for row in rows)
        return
    joined, shared = found.join()
    size, sizes = sum(joined.lengths), np.array([len(row) for row in rows])
    assert found.saved(lambda first: first) == pytest.approx(1 - size / sizes.sum())
    assert size == len(prefixes) + len(rows), "every token with its next one once, and last tokens"
    row = Documents(joined.lengths, size, joined.parents)
    seen, positions = documents_mask(row).dense(), row.positions(torch.arange(size))
    assert found.saved(pairs_of) == pytest.approx(1 - seen.sum() / pairs_of(sizes).sum())
    next_labels = joined.next_labels()
    for number, (start, stop) in enumerate(whole.spans):
        places = shared.places[number, start:stop]
        count = stop - start
        assert (shared.places[number] >= 0).sum() == count
        assert joined.ids[places].tolist() == rows[number]
        assert positions[places].tolist() == list(range(count))
        own = seen[places.numpy()]
        assert np.array_equal(own[:, places.numpy()], np.tril(np.ones((count, count), bool)))
        assert own.sum() == count * (count + 1) // 2, "nothing of other rows"
        has = shared.has_label[number, start : stop - 1]
        assert has.tolist() == masks[number][1:]
        assert next_labels[places[:-1]][has].tolist() == [i for i in labels[number][1:] if i >= 0]
        assert not shared.has_label[number].sum() > has.sum()


def test_a_tree_is_what_the_rows_say() -> None:
    """Two turns after one prompt; the last common token opens each branch."""
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 6], [1, 2, 8], [9, 9]]
    joined, shared = join_alike(padded(rows)) or pytest.fail("nothing is shared")
    assert joined.lengths == (1, 2, 2, 3, 2, 2)
    assert joined.parents == (-1, 0, 1, 1, 0, -1)
    assert shared.places[2].tolist() == [0, 8, 9, -1, -1, -1]


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        ([[1, 2, 3], [4, 5, 6]], None),
        ([[1, 2, 3], [1, 5, 6]], None),  # one token alike, and another one after it
        ([[1], [1], [1]], None),
        ([[1, 2, 3], [1, 2, 3]], [[1, 7, 3], [1, 7, 3]]),  # labels that are not the next token
        ([[1, 2, 3]], None),
    ],
)
def test_what_is_not_alike_stays_apart(rows: list[Ids], labels: list[Ids] | None) -> None:
    assert join_alike(padded(rows, labels)) is None


def test_documents_of_packed_rows_are_rows_of_their_own() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3]])
    ids = torch.tensor([[1, 2, 3, 4, 1, 2, 5], [1, 2, 6, 7, 7, 7, 7]])
    labels = ids.masked_fill(positions == 0, -100)
    whole = read_rows({"input_ids": ids, "labels": labels, "position_ids": positions}, StockModel())
    joined, shared = join_alike(whole) or pytest.fail("nothing is shared")
    assert torch.equal(joined.ids[shared.places], ids)
    assert shared.places[0, 0] == shared.places[0, 4] == shared.places[1, 0]
    assert torch.equal(shared.has_label, (positions > 0)[:, 1:])


def test_counting_labels_of_shared_tokens() -> None:
    """The two rows share the label 3; a rank holds every second token."""
    whole = padded([[1, 2, 3, 4], [1, 2, 3, 5]], [[-100, -100, 3, 4], [-100, -100, 3, -100]])
    _, shared = join_alike(whole) or pytest.fail("nothing is shared")
    assert shared.places.tolist() == [[0, 1, 2, 3], [0, 1, 4, 5]]
    assert shared.counted(torch.arange(6), 6).tolist() == [1, 2, 1]
    assert shared.counted(torch.tensor([5, 3, 1]), 6).tolist() == [2, 2]
    rows, sizes = shared.alike(torch.tensor([2, 1, 0]), 6, by_row=True)
    assert (rows.tolist(), sizes) == ([0, 1], [1, 1])
    assert shared.checksum() != shared._replace(places=shared.places.flip(0)).checksum()


def test_lengths_are_numbers_of_python() -> None:
    """One row learns another word than its next: layouts count the bits of lengths."""
    ids = [1, 2, 3, 4]
    joined, _ = join_alike(padded([ids, ids], [ids, [1, 2, 3, 7]])) or pytest.fail("none shared")
    assert [type(length) for length in joined.lengths] == [int] * len(joined.lengths)
