from typing import Any

import numpy as np
import pytest
import torch

from longctx_patch import LongContextConfig, SequenceShardCollator, pack_rows
from longctx_patch.data.descriptor import Descriptor
from longctx_patch.data.rows import Row
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import LayoutName, make_layout
from longctx_patch.sequence.placement import place


def collator(group_rank: int = 0, **degrees: int) -> SequenceShardCollator:
    return SequenceShardCollator(
        LongContextConfig(**degrees),  # type: ignore[arg-type]
        group_rank=group_rank,
        pad_token_id=9,
    )


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("length", [1, 5, 8, 13])
def test_shards_are_the_whole_batch(layout: LayoutName, length: int) -> None:
    config = LongContextConfig(ulysses_degree=2, ring_degree=2, layout=layout)
    rows = [{"input_ids": list(range(10, 10 + length))}, {"input_ids": [7]}]
    batches = [
        SequenceShardCollator(config, group_rank=rank, pad_token_id=9)(rows) for rank in range(4)
    ]
    padded = 4 * batches[0]["input_ids"].shape[1]
    whole = make_layout(layout, padded, ring=2, ulysses=2)

    def unshard(key: str) -> list[list[int]]:
        return whole.unshard([batch[key] for batch in batches], 1).tolist()

    assert unshard("input_ids")[0] == [*range(10, 10 + length), *[9] * (padded - length)]
    assert unshard("input_ids")[1] == [7, *[9] * (padded - 1)]
    assert unshard("position_ids") == [list(range(padded))] * 2
    wanted = [*range(11, 10 + length), *[-100] * (padded - length + 1)]
    assert unshard("shift_labels") == [wanted, [-100] * padded]
    assert unshard("labels") == unshard("shift_labels")
    said = [Descriptor.read(batch["longctx_shard"]) for batch in batches]
    assert len({descriptor.checksum for descriptor in said}) == 1
    assert [descriptor.cut.group_rank for descriptor in said] == [0, 1, 2, 3]


def put_together(
    config: LongContextConfig, rows: list[dict[str, Any]], **options: Any
) -> tuple[dict[str, list[int]], Documents]:
    """The one row of a batch from the shards of all ranks, and its documents."""
    batches = [
        SequenceShardCollator(config, group_rank=rank, pad_token_id=9, **options)(rows)
        for rank in range(config.sequence_degree)
    ]
    said = [Descriptor.read(batch["longctx_shard"]) for batch in batches]
    documents = said[0].documents
    assert all((it.documents, it.checksum) == (documents, said[0].checksum) for it in said)
    assert len({batch["input_ids"].shape for batch in batches}) == 1  # equal shards
    layout = place(
        config.placement_of(documents),
        documents,
        ring=config.ring_degree,
        ulysses=config.ulysses_degree,
    )
    names = ("input_ids", "position_ids", "labels", "shift_labels")
    whole = {
        name: layout.unshard([batch[name] for batch in batches], 1)[0].tolist() for name in names
    }
    assert whole["labels"] == whole["shift_labels"]
    return whole, documents


# Document lengths of 24 tokens over 3 ranks, which hold 8 each in the contiguous layout.
BOUNDARIES = {
    "on a rank's edge": [8, 16],
    "before it": [7, 17],
    "after it": [9, 15],
    "one-token documents": [1, 1, 6, 1, 14, 1],
    "longer than a rank's share": [3, 20, 1],
    "padding": [5, 4, 2],
    "padding of more than a rank": [2, 1],
}


@pytest.mark.parametrize("layout", [None, "zigzag", "balanced", "contiguous", "striped"])
@pytest.mark.parametrize("lengths", BOUNDARIES.values(), ids=BOUNDARIES.keys())
def test_shards_are_the_packed_row(layout: LayoutName | None, lengths: list[int]) -> None:
    config = LongContextConfig(ring_degree=3, layout=layout)
    total = sum(lengths)
    row = {"input_ids": list(range(100, 100 + total)), "seq_lengths": lengths}
    whole, documents = put_together(config, [row], pad_to_length=24)
    padding = documents.num_tokens - total
    assert documents.lengths == tuple(lengths)
    assert documents.num_tokens == 24
    assert whole["input_ids"] == [*row["input_ids"], *[9] * padding]
    positions = [n for length in lengths for n in range(length)]
    assert whole["position_ids"] == [*positions, *range(padding)]
    labels: list[int] = []
    for length in lengths:
        labels += [*range(101 + len(labels), 100 + len(labels) + length), -100]
    assert whole["labels"] == [*labels, *[-100] * padding]


def test_packed_rows_over_ulysses_and_ring() -> None:
    """Rows are padded to the layout's multiple: 13 tokens become 16 over four ranks."""
    config = LongContextConfig(ulysses_degree=2, ring_degree=2)
    row = {"input_ids": list(range(13)), "seq_lengths": [6, 1, 4, 2]}
    whole, documents = put_together(config, [row])
    assert documents.num_tokens == 16
    assert whole["input_ids"] == [*range(13), 9, 9, 9]
    assert whole["position_ids"] == [*range(6), 0, *range(4), 0, 1, 0, 1, 2]


def test_branches_count_on_and_open_with_their_parents_last_label() -> None:
    """Rows 10 11 12 13 and 10 11 12 14 15, and one of 20 21; the first label counts in one row."""
    ids, labels = [10, 11, 12, 13, 12, 14, 15, 20, 21], [-100, -100, -100, 13, 12, 14, 15, 20, 21]
    row = Row(torch.tensor(ids), torch.tensor(labels), (2, 2, 3, 2), (-1, 0, 0, -1))
    shard = collator().shard([row])
    assert shard["position_ids"].tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1]]
    assert shard["shift_labels"].tolist() == [[-100, 12, 13, -100, 14, 15, -100, 21, -100]]
    said = Descriptor.read(shard["longctx_shard"])
    assert said.documents == Documents((2, 2, 3, 2), 9, (-1, 0, 0, -1))
    assert (said.longest, said.real_lengths) == (5, (9,))
    twice = Descriptor.read(collator().shard([row, row])["longctx_shard"]).documents
    assert twice == Documents((2, 2, 3, 2) * 2, 18, (-1, 0, 0, -1, -1, 4, 4, -1))
    apart = collator().shard([row._replace(parents=())])["longctx_shard"]
    assert Descriptor.read(apart).checksum != said.checksum


def test_several_packed_rows_become_one() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "seq_lengths": [2, 1]},
        {"input_ids": [4, 5]},
        {"input_ids": [6, 7, 8, 0], "attention_mask": [1, 1, 1, 0], "seq_lengths": [1, 2]},
    ]
    whole, documents = put_together(LongContextConfig(ring_degree=2), rows)
    assert documents.lengths == (2, 1, 2, 1, 2)
    assert whole["input_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert whole["position_ids"] == [0, 1, 0, 0, 1, 0, 0, 1]
    assert whole["labels"] == [2, -100, -100, 5, -100, -100, 8, -100]


def test_labels_of_ones_own_stay_in_their_document_and_may_be_none() -> None:
    row = {"input_ids": [1, 2, 3, 4], "labels": [10, 20, 30, 40], "seq_lengths": [2, 2]}
    assert collator()([row])["labels"].tolist() == [[20, -100, 40, -100]]
    assert collator()([{"input_ids": [1, 2], "labels": None}])["labels"].tolist() == [[2, -100]]


def test_other_tokens_or_boundaries_are_another_batch() -> None:
    rows = ([1, 2, 3], [1, 2]), ([1, 2, 3], [2, 1]), ([1, 2, 4], [1, 2])
    made = [collator()([{"input_ids": ids, "seq_lengths": lengths}]) for ids, lengths in rows]
    assert len({tuple(batch["longctx_shard"].flatten().tolist()) for batch in made}) == 3


def test_rows_of_one_document_are_joined_where_asked_for() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    whole, documents = put_together(LongContextConfig(ring_degree=2), rows, packed=True)
    assert documents.lengths == (3, 1)
    assert whole["labels"] == [2, 3, -100, -100]
    apart = collator()(rows)
    assert apart["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]


def test_ids_of_any_whole_type() -> None:
    for dtype in (np.uint16, np.int32, np.int64):
        array = np.array([1, 2, 3], dtype)
        for ids in (array, torch.as_tensor(array)):
            assert collator()([{"input_ids": ids}])["input_ids"].tolist() == [[1, 2, 3]]


def test_empty_rows_add_nothing() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3]}]
    whole, documents = put_together(LongContextConfig(ring_degree=3), rows, packed=True)
    assert documents.lengths == (2, 1)
    assert whole["input_ids"] == [1, 2, 3]
    nothing, _ = put_together(LongContextConfig(ring_degree=2), [{"input_ids": []}], packed=True)
    assert set(nothing["input_ids"]) == {9}
    assert set(nothing["labels"]) == {-100}


def test_one_document_of_a_packed_row_is_an_ordinary_row() -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5]}]
    named = [{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [5]}]
    config = LongContextConfig(ring_degree=2)
    for packed in (False, True):
        assert put_together(config, named, packed=packed) == put_together(config, rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hello"}, r"row 0 has the keys \['text'\].*Tokenise first"),
        ([1, 2, 3], r"row 0 has type list: each row is a mapping with input_ids"),
        ({"input_ids": [1, 2], "position_ids": [0, 0]}, "row 0 has position_ids, which would be"),
        ({"input_ids": [1], "assistant_masks": [1]}, "Make labels of assistant_masks: the token"),
        ({"input_ids": [[1, 2]]}, "must be one-dimensional"),
        ({"input_ids": [1, 2.5]}, "input_ids holds torch.float32, such as 1.0: give whole numbers"),
        ({"input_ids": [True]}, "input_ids holds torch.bool, such as True"),
        ({"input_ids": ["1", "2"]}, r"input_ids is \['1', '2'\].*give a list of whole numbers"),
        ({"input_ids": [1, [2]]}, r"input_ids is \[1, \[2\]\].*give a list of whole numbers"),
        ({"input_ids": [1, None]}, "give a list of whole numbers"),
        ({"input_ids": [3, 4, -5]}, r"input_ids\[2\] is -5: an id is 0 or more\."),
        ({"input_ids": [1, 2], "labels": [-100, 0.5]}, "labels holds torch.float32, such as -100"),
        ({"input_ids": [1, 2], "labels": [1]}, r"labels \[1\] must be"),
        ({"input_ids": [0, 1], "attention_mask": [0, 1]}, "Left padding shifts positions"),
        ({"input_ids": [0, 1], "attention_mask": [1]}, "as long as input_ids"),
        ({"input_ids": [0, 1], "seq_lengths": [1]}, r"seq_lengths \[1\] add up to 1.* has 2 tok"),
        ({"input_ids": [0, 1], "seq_lengths": [2, 0]}, "every document has one or more"),
        ({"input_ids": [0, 1], "seq_lengths": [3, -1]}, "every document has one or more"),
        (
            {"input_ids": [0, 1], "attention_mask": [1, 0], "seq_lengths": [1, 1]},
            "the row has 1 tokens",
        ),
    ],
)
def test_bad_rows_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collator()([row])


def test_a_rank_outside_the_group_and_a_batch_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="a batch of no rows"):
        collator()([])
    with pytest.raises(ValueError, match=r"group_rank=4: .* = 4, so it lies in 0..3"):
        collator(4, ring_degree=4)


def pair(*branches: Any, **prompt: Any) -> dict[str, Any]:
    given = [{"input_ids": ids} if isinstance(ids, list) else ids for ids in branches]
    return {"input_ids": [10, 11, 12], "branches": given} | prompt


def test_branches_are_a_prompt_once_and_its_last_token_with_each_of_them() -> None:
    """The second branch is longer than a rank's share."""
    learned = {"input_ids": [15, 16, 17, 18, 19, 20], "labels": [-100, -100, 17, 18, -100, 20]}
    rows = [pair([13, 14], learned), {"input_ids": [30, 31]}]
    whole, documents = put_together(LongContextConfig(ring_degree=3), rows)
    assert documents == Documents((2, 3, 7, 2), 15, (-1, 0, 0, -1))
    assert whole["input_ids"] == [10, 11, 12, 13, 14, 12, 15, 16, 17, 18, 19, 20, 30, 31, 9]
    assert whole["position_ids"] == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0]
    wanted = [-100, -100, 13, 14, -100, -100, -100, 17, 18, -100, 20, -100, 31, -100, -100]
    assert whole["labels"] == wanted
    packed = [*pack_rows([*rows, pair([1])], 15)]
    assert [row.get("seq_parents") for row in packed] == [[-1, 0, 0, -1], None]
    assert put_together(LongContextConfig(ring_degree=3), [packed[0]]) == (whole, documents)


@pytest.mark.parametrize(
    ("row", "lengths", "labels"),
    [
        (pair([1, 2]), (5,), [-100, -100, 1, 2, -100]),
        (pair([1, 2], labels=[10, 11, 12]), (5,), [11, 12, 1, 2, -100]),
        (pair([1, 2], [3], input_ids=[7]), (3, 2), [1, 2, -100, 3, -100]),
        (pair([1, 2], [3, 4], input_ids=[]), (2, 2), [2, -100, 4, -100]),
    ],
)
def test_one_branch_and_short_prompts_are_ordinary_documents(
    row: dict[str, Any], lengths: tuple[int, ...], labels: list[int]
) -> None:
    batch = collator()([row])
    assert Descriptor.read(batch["longctx_shard"]).documents == Documents(lengths, sum(lengths))
    assert batch["labels"].tolist() == [labels]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (pair(), r"row 0: branches is \[\]: give a list of what goes on"),
        (pair([1], 5), "row 0, branch 1 has type int: each row is a mapping"),
        (pair([1], []), "row 0, branch 1 has 0 documents: .*Leave out empty branches"),
        (pair([1], pair([1], [2])), "row 0, branch 1 has 3 documents: .*seq_parents"),
        (pair([1], seq_lengths=[1, 2]), "row 0 has 2 documents: a prompt is one"),
        (pair([1], [2], labels=[-100, 11, -100]), r"row 0: labels\[1\] is 11, .*once for each"),
        (pair([1], [2], labels=[-100, -100, 12]), r"row 0: labels\[2\] is 12, .*Make it -100"),
        (
            {"input_ids": [1, 2], "seq_lengths": [1, 1], "seq_parents": [-1, 1]},
            r"parents \(-1, 1\) of 2 documents: each document has one, an earlier",
        ),
    ],
)
def test_bad_branches_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collator()([row])


def test_branches_longer_than_a_packed_row_are_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0 has 6 tokens with its branches.*seq_len=5"):
        list(pack_rows([pair([1], [2])], 5, too_long="split"))
