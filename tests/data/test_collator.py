from typing import Any

import pytest
import torch

from longctx_patch import LongContextConfig, SequenceShardCollator
from longctx_patch.config import LayoutName
from longctx_patch.layout import make_layout


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
    assert len({tuple(batch["longctx_shard"].flatten().tolist()) for batch in batches}) == 1


def test_labels_are_shifted_before_the_cut() -> None:
    config = LongContextConfig(ring_degree=2, layout="contiguous")
    batch = SequenceShardCollator(config, group_rank=0, pad_token_id=0)(
        [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 30, 40]}]
    )
    assert batch["input_ids"].tolist() == [[1, 2]]
    assert batch["shift_labels"].tolist() == [[-100, 30]]  # 30 belongs to the other rank's token


def test_right_padding_is_dropped() -> None:
    batch = collator()([{"input_ids": [1, 2, 0, 0], "attention_mask": [1, 1, 0, 0]}])
    assert batch["input_ids"].tolist() == [[1, 2]]


def test_a_batch_of_nothing_is_refused_and_labels_may_be_none() -> None:
    with pytest.raises(ValueError, match="a batch of no rows"):
        collator()([])
    assert collator()([{"input_ids": [1, 2], "labels": None}])["labels"].tolist() == [[2, -100]]


def test_pad_to_length() -> None:
    config = LongContextConfig(ring_degree=2)
    collate = SequenceShardCollator(config, group_rank=1, pad_token_id=0, pad_to_length=30)
    assert collate([{"input_ids": [1]}])["input_ids"].shape == (1, 16)


def test_different_rows_have_different_checksums() -> None:
    one, other = (collator()([{"input_ids": [1, token]}]) for token in (2, 3))
    assert not torch.equal(one["longctx_shard"], other["longctx_shard"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hello"}, r"row 0 has the keys \['text'\].*Tokenise first"),
        ([1, 2, 3], r"row 0 has type list: each row is a mapping with input_ids"),
        ({"input_ids": [1, 2], "position_ids": [0, 0]}, "row 0 has position_ids, which would be"),
        ({"input_ids": [[1, 2]]}, "must be one-dimensional"),
        ({"input_ids": [1, 2], "labels": [1]}, r"labels \[1\] must be"),
        ({"input_ids": [0, 1], "attention_mask": [0, 1]}, "Left padding shifts positions"),
        ({"input_ids": [0, 1], "attention_mask": [1]}, "as long as input_ids"),
    ],
)
def test_bad_rows_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collator()([row])


def test_the_rank_must_be_in_the_group() -> None:
    with pytest.raises(ValueError, match=r"group_rank=4: .* = 4, so it lies in 0..3"):
        collator(4, ring_degree=4)
