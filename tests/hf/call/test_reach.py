"""Documents beyond what a model's RoPE reaches are refused on all ranks, or allowed by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from longctx_patch import LongContextConfig, PatchHandle, patch
from tests.hf.on_ranks import on_ranks
from tests.hf.steps import collated
from tests.hf.tiny import tiny_model, token_rows

REACH = 24
TWO = LongContextConfig(ring_degree=2)
BEYOND = r"25 tokens, but the model reaches 24 .*scale_rope.*target_length=25.*allow_beyond_reach"


def whole_rows(length: int, documents: tuple[int, ...] = ()) -> dict[str, Any]:
    ids = torch.tensor([row["input_ids"] for row in token_rows(length, num_rows=1)])
    places = torch.cat([torch.arange(size) for size in documents or (length,)])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(places == 0, -100), "position_ids": places}


def test_all_ranks_refuse_the_first_row_that_is_too_long() -> None:
    """As whole rows and as shards; packed documents count by their own lengths."""

    def train(model: Any, handle: PatchHandle) -> list[float]:
        reached = [
            model(**whole_rows(REACH)).loss,
            model(**whole_rows(2 * REACH, (REACH, REACH))).loss,
        ]
        with pytest.raises(ValueError, match=BEYOND):
            model(**whole_rows(REACH + 1))
        with pytest.raises(ValueError, match=BEYOND):
            model(**collated(handle, [*token_rows(REACH - 1), *token_rows(REACH + 1)]))
        return [loss.item() for loss in reached]

    assert all(map(all, on_ranks(tiny_model(max_position_embeddings=REACH), TWO, train)))


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_one_rank_refuses_rows_of_any_form(name: str) -> None:
    """Rows with a mask of their own take the stock path."""
    model = tiny_model(max_position_embeddings=REACH)
    handle = patch(model, LongContextConfig())
    batch = whole_rows(REACH + 1)
    mask = torch.ones(1, 1, REACH + 1, REACH + 1, dtype=torch.bool).tril()
    del batch["position_ids"]
    given = batch if name == "position_ids" else batch | {name: mask}
    with pytest.raises(ValueError, match=BEYOND):
        model(**given)
    handle.unpatch()
    stock = model(**given).loss
    patch(model, replace(handle.config, allow_beyond_reach=True))
    torch.testing.assert_close(model(**given).loss, stock)
