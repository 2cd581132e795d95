"""What the recurrent layers of checkpointed models send when they are recomputed, by each policy.

Loss and every gradient are those of the stock model in float64, as in `test_mixers`. What a step
sends in all is what the plans say (`step_of_ranks`), so that backward sends the rest as planned.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import nn

from longctx_patch import LongContextConfig, PatchHandle
from longctx_patch.families.recurrent_layers import layer_traffic, recurrent_layers
from longctx_patch.hf.model.transformers_api import CALL_KEY, recurrent_modules
from longctx_patch.planner.recurrent_cost import row_of
from longctx_patch.plans.recurrent import RecurrentWay
from longctx_patch.plans.traffic import Traffic
from tests.hf.by_documents import stock_step
from tests.hf.call.test_mixers import DOCUMENTS, LENGTH, assert_exact
from tests.hf.float64 import in_float64
from tests.hf.tiny import SUPPORTED


class Case(NamedTuple):
    options: dict[str, Any]
    exchanges: bool = False
    """Whether a recompute makes all exchanges of its layer again."""


CASES = (
    Case({"ring_degree": 2, "checkpoint": "attention"}),
    Case({"ring_degree": 4, "checkpoint": "offload", "layout": "contiguous"}),
    Case({"ulysses_degree": 2, "ring_degree": 2, "checkpoint": "full"}, exchanges=True),
    Case(
        {"ulysses_degree": 4, "checkpoint": "attention", "attention_kept": 0.4, "layout": "zigzag"}
    ),
    Case({"ulysses_degree": 2, "ring_degree": 2, "checkpoint": "auto"}),
    Case(
        {"ring_degree": 2, "checkpoint": "offload", "attention_kept": 0.0, "layout": "zigzag"},
        exchanges=True,
    ),
)
HEADS = (
    Case({"ulysses_degree": 2, "ring_degree": 2, "checkpoint": "attention"}),
    Case({"ulysses_degree": 2, "checkpoint": "offload", "attention_kept": 0.4}),
    Case({"ulysses_degree": 2, "ring_degree": 2, "checkpoint": "full"}, exchanges=True),
)


def watch(model: nn.Module) -> None:
    """Have each recurrent layer note what every run of it sends, and the row's documents."""
    for mixer in recurrent_modules(model):
        vars(mixer)["sent"] = []
        mixer.register_forward_pre_hook(_begins, with_kwargs=True)
        mixer.register_forward_hook(_ends, with_kwargs=True)


def _begins(mixer: Any, _: Any, kwargs: dict[str, Any]) -> None:
    mixer.documents = kwargs[CALL_KEY].documents
    mixer.sent.append(Traffic(*kwargs[CALL_KEY].group.counters.sent_ever()))


def _ends(mixer: Any, _: Any, kwargs: dict[str, Any], __: Any) -> None:
    now, before = kwargs[CALL_KEY].group.counters.sent_ever(), mixer.sent.pop()
    mixer.sent.append(Traffic(now[0] - before.messages, now[1] - before.bytes))


def recompute_as(case: Case, way: RecurrentWay) -> Callable[[PatchHandle], None]:
    """Check on a rank after its step that each layer sent what its config says."""

    def check(handle: PatchHandle) -> None:
        mixers: list[Any] = recurrent_modules(handle.model)
        for mixer in mixers:
            row = row_of(handle.config, mixer.documents)
            layers = recurrent_layers(handle.model.config, itemsize=8)
            assert layers is not None
            planned = layer_traffic(layers, row, way)[handle.group_rank]
            again = planned.forward if case.exchanges else planned.replay
            assert mixer.sent == [planned.forward, again], case
            assert case.exchanges or way == "heads" or again == Traffic()

    return check


def assert_sent(model: Any, case: Case, lengths: tuple[int, ...], way: RecurrentWay) -> None:
    model, options = copy.deepcopy(model), case.options
    wanted = stock_step(copy.deepcopy(model), lengths)
    watch(model)
    if options.get("ulysses_degree", 1) > 1:
        options = options | {"recurrent_exchange": way}
    assert_exact(model, LongContextConfig(**options), lengths, wanted, recompute_as(case, way))


ALL = range(len(CASES))
NUMBERS = {"qwen3_5_text": ALL, "falcon_h1": ALL[1::3], "lfm2": ALL[2::3]}
"""Cases of each kind of layer. Those of Falcon-H1 have attention beside their recurrence, in one
frame."""


@pytest.mark.parametrize(
    ("family", "number"),
    [
        (name, number)
        for name, numbers in NUMBERS.items()
        if name in SUPPORTED
        for number in numbers
    ],
)
def test_states_and_tails_travel_once_where_attention_is_kept(family: str, number: int) -> None:
    is_packed = (number // 2 + (family in ("falcon_h1", "lfm2"))) % 2
    lengths = DOCUMENTS if is_packed else (LENGTH,)
    assert_sent(in_float64(family), CASES[number], lengths, "states")


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.options["checkpoint"])
def test_heads_travel_again_and_the_rings_states_do_not(case: Case) -> None:
    model = in_float64("qwen3_5_text")
    for lengths in (DOCUMENTS, (LENGTH,)):
        assert_sent(model, case, lengths, "heads")
