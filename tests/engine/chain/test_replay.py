"""What a recompute of recurrent layers keeps of other ranks' items, and what it exchanges anew.

What is sent under each policy: tests/hf/call/test_mixer_traffic.py.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig, PatchHandle
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.hf.model.transformers_api import recurrent_modules
from longctx_patch.planner.recurrent_cost import row_of
from longctx_patch.plans import chain
from longctx_patch.plans.recurrent_traffic import states_traffic
from longctx_patch.plans.traffic import Traffic
from tests.hf.call.test_mixer_traffic import layer_traffic, watch
from tests.hf.float64 import stock_step, whole_row
from tests.hf.steps import Step, errors, on_ranks, step_of_ranks
from tests.hf.tiny import featured_model, gradients

FAMILY = "qwen3_5_text"
KEEPS = LongContextConfig(ring_degree=4, layout="contiguous", checkpoint="attention")


@pytest.fixture(autouse=True)
def limit_is_read() -> Iterator[None]:
    """Traffic is not remembered from a test with another limit."""
    states_traffic.cache_clear()
    yield
    states_traffic.cache_clear()


@pytest.mark.parametrize(("limit", "again"), [(0, (4, 5568)), (5000, (3, 4608)), (7000, (0, 0))])
def test_what_is_large_is_exchanged_again_on_every_rank(
    limit: int, again: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank sends one tail of a convolution and three states, which are larger."""
    monkeypatch.setattr(chain, "KEPT_AT_MOST", limit)
    model: Any = featured_model(FAMILY)
    wanted = stock_step(featured_model(FAMILY), (43,))
    layers = recurrent_layers(model.config)
    assert layers is not None
    watch(model)

    def check(handle: PatchHandle) -> None:
        for mixer in recurrent_modules(handle.model):
            row = row_of(handle.config, mixer.documents)  # type: ignore[arg-type]
            planned = layer_traffic(mixer, layers, row, "states")[handle.group_rank]
            assert mixer.sent == [planned.forward, planned.replay]
            assert handle.group_rank or planned.replay == Traffic(*again)

    found = step_of_ranks(model, KEEPS, whole_row((43,)), check)
    assert max(errors(Step(found.loss, found.grads), wanted).values()) < 1e-4


def test_documents_that_stay_on_their_rank_exchange_nothing() -> None:
    model: Any = featured_model(FAMILY)
    watch(model)

    def check(handle: PatchHandle) -> None:
        for mixer in recurrent_modules(handle.model):
            assert mixer.sent == [Traffic()] * 2

    step_of_ranks(model, KEEPS, whole_row((11, 11, 11, 11)), check)


def test_a_graph_can_go_backward_twice() -> None:
    """Each backward takes what was kept from the beginning on."""

    def twice(model: Any, handle: PatchHandle) -> None:
        loss = model(**whole_row((43,))).loss
        loss.backward(retain_graph=True)
        first = {name: grad.clone() for name, grad in gradients(model).items()}
        loss.backward()
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, 2 * first[name], rtol=1e-5, atol=1e-8)

    on_ranks(featured_model(FAMILY), replace(KEEPS, loss="logits"), twice)


def test_what_was_kept_is_freed_with_its_graph() -> None:
    alive: list[int] = []
    for _ in range(3):  # the first step makes what later ones share
        step_of_ranks(featured_model(FAMILY), KEEPS, whole_row((43,)))
        gc.collect()
        alive.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    assert alive[1] == alive[2]
