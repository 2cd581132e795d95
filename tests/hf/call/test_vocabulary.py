"""Ids, and labels, beyond the vocabulary are refused before a kernel meets them, by every rank."""

from typing import Any

import pytest
import torch

from longctx_patch import LongContextConfig, PatchHandle, patch
from tests.hf.on_ranks import on_ranks
from tests.hf.steps import collated
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

    def refuse(model: Any, handle: PatchHandle) -> str:
        with pytest.raises(ValueError, match="tokenizer against the model's vocab_size") as raised:
            model(**collated(handle, [ROWS[name]]))
        return str(raised.value)

    largest = max(ROWS[name]["input_ids"])
    wanted = f"input_ids from 0 to {largest}" if name != "label" else f"label {VOCABULARY}: labels"
    for said in on_ranks(tiny_model(), config, refuse):
        assert wanted in said


def test_the_last_id_is_one() -> None:
    model = tiny_model()
    handle, last = patch(model, LongContextConfig()), VOCABULARY - 1
    assert torch.isfinite(model(**collated(handle, [{"input_ids": [last, 0, last]}])).loss)
