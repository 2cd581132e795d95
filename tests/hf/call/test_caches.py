"""A cache by either name: `cache` since transformers 5.24, and `past_key_values` before."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from longctx_patch import LongContextConfig, PatchHandle
from longctx_patch.hf.call.inputs import check_whole_rows, input_problem
from longctx_patch.hf.model.transformers_api import CACHE_NAMES, cache_name
from tests.hf.on_ranks import on_ranks
from tests.hf.tiny import featured_model

IDS = torch.arange(1, 12)[None]


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_refused_where_rows_are_shared(name: str) -> None:
    positions = torch.arange(IDS.shape[1])[None]
    said = input_problem({name: DynamicCache()}, positions, wants_router_logits=False)
    assert said is not None
    assert said.startswith(f"{name} with a sharded batch: a cache holds one rank's keys only")
    assert input_problem({name: None}, positions, wants_router_logits=False) is None
    model, config = featured_model("llama"), LongContextConfig(ring_degree=2)

    def run(mine: Any, handle: PatchHandle) -> None:
        with pytest.raises(ValueError, match=rf"^{name} in training: a cache holds one rank's"):
            mine(input_ids=IDS, labels=IDS, **{name: DynamicCache()})
        late: dict[str, Any] = {"position_ids": positions + 7, "use_cache": True}
        with pytest.raises(ValueError, match=r"position_ids start \[7, 8, 9, 10\]"):
            check_whole_rows(handle.group, late)
        check_whole_rows(handle.group, late | {name: DynamicCache()})
        mine.eval()
        with handle.sharing_evaluation(), torch.no_grad():  # a token after those of a cache
            past = mine(input_ids=IDS[:, :5], use_cache=True).past_key_values
            found = mine(input_ids=IDS[:, 5:], labels=IDS[:, 5:], **{taken(mine, name): past})
            assert torch.equal(found.logits, expected)

    def taken(mine: Any, name: str) -> str:
        """The name, where this version of transformers knows it."""
        return name if name == CACHE_NAMES[1] else cache_name(mine)

    with torch.no_grad():
        stock = copy.deepcopy(model).eval()
        past = stock(input_ids=IDS[:, :5], use_cache=True).past_key_values
        expected = stock(input_ids=IDS[:, 5:], past_key_values=past).logits
    on_ranks(model, config, run)


class KeepsOne(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, past_key_values: Any = None) -> Any:
        cache = past_key_values
        return hidden if cache is None else cache


def test_a_local_variable_is_no_argument() -> None:
    assert cache_name(KeepsOne()) == "past_key_values"
