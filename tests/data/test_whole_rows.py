"""Batches as trainers make them are read as the rows that they came from."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies
from transformers import DataCollatorWithFlattening

from longctx_patch.data.stock_rows import StockModel
from longctx_patch.data.whole_rows import read_rows

ROWS = [[5, 6, 7], [8], [9, 10, 11, 12]]
DOCUMENTS = strategies.lists(strategies.integers(1, 5), min_size=1, max_size=4)


def padded(rows: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))

    def fill(row: list[int], value: int) -> list[int]:
        padding = [value] * (longest - len(row))
        return padding + row if side == "left" else row + padding

    labels = rows if side == "right" else [[-100, *row[1:]] for row in rows]
    return {
        "input_ids": torch.tensor([fill(row, 0) for row in rows]),
        "labels": torch.tensor([fill(row, -100) for row in labels]),
        "attention_mask": torch.tensor([fill([1] * len(row), 0) for row in rows]),
    }


@pytest.mark.parametrize("positions", [None, "from the row", "from the column"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_dropped(side: str, positions: str | None) -> None:
    batch = padded(ROWS, side)
    if positions == "from the row":
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    elif positions is not None:
        batch["position_ids"] = torch.arange(4)[None]
    found = read_rows(batch, StockModel())
    assert [row.ids.tolist() for row in found.rows] == ROWS
    assert [row.labels.tolist()[1:] for row in found.rows] == [row[1:] for row in ROWS]
    assert [row.lengths for row in found.rows] == [(3,), (1,), (4,)]
    assert found.spans == (((1, 4), (3, 4), (0, 4)) if side == "left" else ((0, 3), (0, 1), (0, 4)))
    assert (found.length, found.is_packed) == (4, False)


def test_rows_without_labels_or_tokens() -> None:
    mask = torch.tensor([[1, 1], [0, 0]])
    full, empty = read_rows(
        {"input_ids": torch.ones(2, 2), "attention_mask": mask}, StockModel()
    ).rows
    assert full.labels.tolist() == [-100, -100]
    assert (len(empty.ids), empty.lengths) == (0, ())


@given(strategies.lists(DOCUMENTS, min_size=1, max_size=3))
def test_packed_documents_are_found_in_positions(packs: list[list[int]]) -> None:
    longest = max(map(sum, packs))
    positions = torch.zeros(len(packs), longest, dtype=torch.int64)
    for row, lengths in enumerate(packs):
        positions[row, : sum(lengths)] = torch.cat([torch.arange(n) for n in lengths])
    batch = {"input_ids": torch.ones_like(positions), "position_ids": positions}
    padded = [lengths + [1] * (longest - sum(lengths)) for lengths in packs]  # each token alone
    assert [list(row.lengths) for row in read_rows(batch, StockModel()).rows] == padded
    batch["seq_lengths"] = padded  # type: ignore[assignment]
    assert [list(row.lengths) for row in read_rows(batch, StockModel()).rows] == padded


def test_what_transformers_flattens() -> None:
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": row} for row in ROWS])
    (row,) = read_rows(batch, StockModel()).rows
    assert row.ids.tolist() == [token for ids in ROWS for token in ids]
    assert row.lengths == (3, 1, 4)
    assert row.next_labels().tolist() == [6, 7, -100, -100, 10, 11, 12, -100]


IDS = torch.arange(1, 7).view(1, 6)
PACKED = torch.tensor([[0, 1, 0, 1, 2, 3]])
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": IDS[0]}, r"input_ids: \[6\], but whole rows are a tensor \[rows, tokens\]"),
    ({"input_ids": None}, "input_ids: NoneType"),
    ({"labels": IDS[:, 1:]}, r"labels \[1, 5\] for input_ids \[1, 6\]"),
    ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]])}, "a hole between columns 0 and 6"),
    ({"attention_mask": torch.ones(1, 1, 6, 6)}, r"attention_mask \[1, 1, 6, 6\] .*mask=\.\.\."),
    ({"position_ids": torch.arange(3, 9)[None]}, r"position_ids \[3, 4, 5.*count up from 0"),
    ({"position_ids": torch.tensor([[0, 1, 3, 4, 0, 1]])}, "count up from 0 in each document"),
    ({"position_ids": torch.arange(6)}, r"position_ids \[6\]"),
    ({"seq_lengths": [[2, 3]]}, r"seq_lengths \[\(2, 3\)\] for rows of \[6\] tokens"),
    ({"cu_seq_lens_q": torch.tensor([0, 4, 3, 6])}, r"cu_seq_lens_q .* for rows of \[6\] tokens"),
    ({"seq_lengths": [[2, 4]], "cu_seq_lens_q": [0, 3, 6]}, "say different documents"),
    ({"labels": IDS, "position_ids": PACKED}, "a label on the first token of a document"),
    (
        {"labels": IDS, "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])},
        "row 0 has labels on padding: give -100",
    ),
    (
        {
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1]]),
            "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        },
        "packed rows with an attention_mask: transformers looks for documents only where",
    ),
    ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]])}, "other than 0 and 1: it marks padd"),
    ({"cu_seq_lens_q": torch.tensor([1, 3, 7])}, "cu_seq_lens_q"),
    ({"seq_idx": torch.zeros(1, 6)}, "seq_idx without position_ids"),
    ({"seq_lengths": [[2, 4]]}, "seq_lengths without position_ids"),
    ({"labels": IDS.float()}, r"labels of torch.float32: .*Use labels.long\(\)"),
    ({"seq_idx": torch.zeros(2, 3), "position_ids": torch.arange(6)[None]}, r"seq_idx \[2, 3\]"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rows({"input_ids": IDS} | changes, StockModel())


def test_positions_that_attention_depends_on_are_those_of_transformers() -> None:
    """Ministral 3 scales queries by their position; transformers counts columns unless told."""
    stock = StockModel(sees_absolute_positions=True)
    batch = padded(ROWS, "left")
    for positions in (None, torch.arange(4)[None]):
        with pytest.raises(ValueError, match=r"on the positions themselves, .*or pad on the right"):
            read_rows(batch | {"position_ids": positions}, stock)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert read_rows(batch, stock).spans == (
        (1, 4),
        (3, 4),
        (0, 4),
    )
    read_rows(padded(ROWS, "right"), stock)


def test_documents_that_the_stock_model_does_not_see_are_refused() -> None:
    lengths = {"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 2, 6])}
    with pytest.raises(ValueError, match="cu_seq_lens_q without position_ids"):
        read_rows(lengths, StockModel())
    assert read_rows(lengths, StockModel(takes_lengths=True)).rows[0].lengths == (2, 4)
    packed = {"input_ids": IDS, "position_ids": PACKED}
    with pytest.raises(ValueError, match="transformers' own model of this type doesn't look for"):
        read_rows(packed, StockModel(finds_documents=False))
    with pytest.raises(ValueError, match="packed rows with use_cache=True"):
        read_rows(packed | {"use_cache": True}, StockModel())
