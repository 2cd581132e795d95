"""What recurrent layers send, in forward, in a recompute by each policy and in backward, whether
their states are handed on or their heads are exchanged for tokens; that such steps are exact is
tested in `tests/hf/test_states_and_latents.py`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import nn

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.families.recurrent_layers import RecurrentLayers, recurrent_layers
from longctx_patch.hf.model.transformers_api import CALL_KEY, recurrent_modules
from longctx_patch.planner.recurrent_cost import row_of
from longctx_patch.plans.chain import ChainTraffic, make_chain
from longctx_patch.plans.recurrent import RecurrentWay
from longctx_patch.plans.recurrent_traffic import Row, recurrence_traffic
from longctx_patch.plans.traffic import Traffic
from tests.hf.call.test_mixers import DOCUMENTS, LENGTH
from tests.hf.float64 import whole_row
from tests.hf.steps import on_ranks, step_of_ranks
from tests.hf.tiny import SUPPORTED, featured_model


class Case(NamedTuple):
    family: str
    way: RecurrentWay
    options: dict[str, Any]
    exchanges: bool = False
    """Whether a recompute makes all exchanges of its layer again."""
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = DOCUMENTS


PAIRS = {"ulysses_degree": 2, "ring_degree": 2}
STATES: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"ring_degree": 2, "checkpoint": "attention"}, False),
    ({"ring_degree": 4, "checkpoint": "offload", "layout": "contiguous"}, False),
    (PAIRS | {"checkpoint": "full"}, True),
    (
        {"ulysses_degree": 4, "checkpoint": "attention"}
        | {"attention_kept": 0.4, "layout": "zigzag"},
        False,
    ),
    (PAIRS | {"checkpoint": "auto"}, False),
    (
        {"ring_degree": 2, "checkpoint": "offload", "attention_kept": 0.0, "layout": "zigzag"},
        True,
    ),
)
HEADS: tuple[tuple[dict[str, Any], bool], ...] = (
    (PAIRS | {"checkpoint": "attention"}, False),
    ({"ulysses_degree": 2, "checkpoint": "offload", "attention_kept": 0.4}, False),
    (PAIRS | {"checkpoint": "full"}, True),
)


def cases() -> Iterator[Case]:
    """Two key heads for four value heads; two groups for eight heads; a decay per channel; a
    convolution alone; and Falcon-H1's attention beside its recurrence, in one frame."""
    for family in ("qwen3_5_text", "bamba", "kimi_linear"):
        yield from (Case(family, way, PAIRS) for way in get_args(RecurrentWay))
        if family != "bamba":  # Mamba-2's torch function gives float32, its kernels bfloat16
            yield Case(family, "heads", PAIRS, dtype=torch.bfloat16)
    yield Case("lfm2", "states", PAIRS)
    for number, (options, exchanges) in enumerate(STATES):
        lengths = DOCUMENTS if number // 2 % 2 else (LENGTH,)
        for family in ("qwen3_5_text", ("lfm2", "falcon_h1")[number % 2]):
            yield Case(family, "states", options, exchanges, lengths=lengths)
    for options, exchanges in HEADS:
        yield Case("qwen3_5_text", "heads", options, exchanges)


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


def convolution_traffic(mixer: nn.Module, row: Row) -> tuple[ChainTraffic, ...]:
    """What each rank sends for a layer's convolutions: the inputs before each piece of a document,
    as many as their kernels reach over."""
    convolutions = [part for part in mixer.modules() if isinstance(part, nn.Conv1d)]
    (reach,) = {part.kernel_size[0] - 1 for part in convolutions}
    width = sum(part.in_channels * part.weight.itemsize for part in convolutions)
    chain = make_chain(row.layout, row.documents)

    def num_bytes(number: int) -> int:
        return width * min(reach, chain.segments[number].tokens.size)

    return chain.traffic_of_ranks(chain.tails(reach), num_bytes)


def layer_traffic(
    mixer: nn.Module, layers: RecurrentLayers, row: Row, way: RecurrentWay
) -> list[ChainTraffic]:
    """What each rank sends for one layer; keys travel as the newest transformers hands them on."""
    found = convolution_traffic(mixer, row)
    if layers.recurrence is None:
        return list(found)
    itemsize = next(mixer.parameters()).itemsize
    shape = replace(layers.recurrence, itemsize=itemsize)
    of_recurrence = recurrence_traffic(shape, row, way)
    return [a.plus(b) for a, b in zip(found, of_recurrence, strict=True)]


@pytest.mark.parametrize("case", [each for each in cases() if each.family in SUPPORTED], ids=str)
def test_each_layer_sends_what_its_config_says(case: Case) -> None:
    """From the model's sizes, the row and the degrees alone. What the step sends in all is what
    its layers have planned, backward too (`step_of_ranks`)."""
    options = dict(case.options)
    if options.get("ulysses_degree", 1) > 1:
        options["recurrent_exchange"] = case.way
    model: Any = featured_model(case.family).to(case.dtype)
    layers = recurrent_layers(model.config)
    assert layers is not None
    watch(model)

    def check(handle: PatchHandle) -> None:
        mixers: list[Any] = recurrent_modules(handle.model)
        first = handle.first_step
        assert first is not None
        assert len(mixers) == len(first._recurrent) == layers.num_layers
        for number, mixer in zip(sorted(first._recurrent), mixers, strict=True):
            row = row_of(handle.config, mixer.documents)
            planned = layer_traffic(mixer, layers, row, case.way)[handle.group_rank]
            again = planned.forward if case.exchanges else planned.replay
            is_recomputed = "checkpoint" in options
            assert mixer.sent == [planned.forward, *[again] * is_recomputed]
            assert case.exchanges or case.way == "heads" or again == Traffic()
            if case.family != "falcon_h1":  # where attention is counted with it
                assert first._traffic[number].backward == planned.backward

    step_of_ranks(model, LongContextConfig(**options), whole_row(case.lengths), check)


EXCHANGED = LongContextConfig(ulysses_degree=2, recurrent_exchange="heads")


def test_the_first_step_says_what_was_exchanged_and_heads_that_do_not_divide_are_refused() -> None:
    model = featured_model("bamba")
    with pytest.raises(ValueError, match="'heads': 8 heads with a state are no multiple of ulysse"):
        patch(model, replace(EXCHANGED, ulysses_degree=3))
    with pytest.raises(ValueError, match="recurrent_exchange='heads': LlamaForCausalLM has no rec"):
        patch(featured_model("llama"), EXCHANGED)
    with pytest.raises(ValueError, match="recurrent_exchange='heads' with ulysses_degree=1: no ra"):
        LongContextConfig(recurrent_exchange="heads")
    with pytest.raises(ValueError, match="recurrent_exchange='head'"):
        LongContextConfig(recurrent_exchange="head")  # type: ignore[arg-type]

    def say(model: Any, handle: PatchHandle) -> str:
        model(**whole_row((LENGTH,))).loss.backward()
        return repr(handle.first_step)

    for says in on_ranks(model, EXCHANGED, say):
        assert "recurrent with heads exchanged" in says
        assert says.startswith("<first step: 3 of 3 layers (1 with attention, 2 recurrent) over 2 ")
