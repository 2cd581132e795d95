"""Ids, and labels, beyond the vocabulary are refused before a kernel meets them, by every rank."""

import pytest
import torch

from longctx_patch import LongContextConfig, SequenceShardCollator, patch, run_virtual_ranks
from longctx_patch import virtual_group as group_of
from longctx_patch.transport import VirtualTransport
from tests.hf.tiny import VOCABULARY, tiny_model

ROWS = {
    "masked": {"input_ids": [1, 2, 3, VOCABULARY], "labels": [1, 2, -100, -100]},
    "first": {"input_ids": [2**40, 2, 3, 4], "labels": [-100] * 4},
    "label": {"input_ids": [1, 2, 3, 4], "labels": [1, 2, VOCABULARY, 4]},
}


@pytest.mark.parametrize("name", ROWS)
def test_every_rank_refuses_what_one_of_them_has(name: str) -> None:
    """Only one rank has the token: the other would have waited for it."""
    config = LongContextConfig(ring_degree=2, layout="contiguous")
    models = [tiny_model() for _ in range(2)]

    def refuse(transport: VirtualTransport) -> str:
        group = group_of(transport, config)
        model = models[group.group_rank]
        patch(model, config, group=group)
        collate = SequenceShardCollator(config, group_rank=group.group_rank, pad_token_id=0)
        with pytest.raises(ValueError, match="tokenizer against the model's vocab_size") as raised:
            model(**collate([ROWS[name]]))
        return str(raised.value)

    largest = max(ROWS[name]["input_ids"])
    wanted = f"input_ids from 0 to {largest}" if name != "label" else f"label {VOCABULARY}: labels"
    for said in run_virtual_ranks(2, refuse):
        assert wanted in said


def test_the_last_id_is_one() -> None:
    model = tiny_model()
    patch(model, LongContextConfig())
    collate = SequenceShardCollator(LongContextConfig(), group_rank=0, pad_token_id=0)
    last = VOCABULARY - 1
    assert torch.isfinite(model(**collate([{"input_ids": [last, 0, last]}])).loss)
