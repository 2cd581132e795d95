"""Recurrent layers whose heads are exchanged for tokens, against the stock model in float64, as in
`test_mixers`: loss, every gradient and traffic."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch

from longctx_patch import LongContextConfig, patch
from longctx_patch.engine.groups import virtual_group
from longctx_patch.families.recurrent_layers import layer_traffic, recurrent_layers
from longctx_patch.hf.model import transformers_api
from longctx_patch.planner.recurrent_cost import row_of
from longctx_patch.plans.recurrent import RecurrentWay
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.transport import VirtualTransport, run_virtual_ranks
from tests.hf.by_documents import stock_step, whole_row
from tests.hf.call.test_mixers import DOCUMENTS, LENGTH, TOLERANCE
from tests.hf.float64 import in_float64
from tests.hf.on_ranks import step_of_ranks
from tests.hf.steps import errors
from tests.hf.tiny import SUPPORTED, featured_model

HEADS = LongContextConfig(ulysses_degree=2, recurrent_exchange="heads")
WAYS = {
    (LENGTH,): (HEADS, replace(HEADS, ring_degree=2, layout="contiguous", checkpoint="full")),
    DOCUMENTS: (
        replace(HEADS, ulysses_degree=4, checkpoint="full"),
        replace(HEADS, ring_degree=2, checkpoint="attention"),
    ),
}
FAMILIES = [name for name in ("qwen3_5_text", "bamba", "kimi_linear") if name in SUPPORTED]
"""Two key heads for four value heads; two groups for eight heads; a decay per channel."""


@pytest.mark.parametrize("lengths", WAYS, ids=["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exchanged_heads_are_exact(family: str, lengths: tuple[int, ...]) -> None:
    model = in_float64(family)
    wanted = stock_step(copy.deepcopy(model), lengths)
    # Kimi's torch function goes token by token, so it runs one way of each row.
    for config in WAYS[lengths][-1 if family == "kimi_linear" else 0 :]:
        found = errors(step_of_ranks(model, config, whole_row(lengths)), wanted)
        wrong = {name: error for name, error in found.items() if not error < TOLERANCE}
        assert not wrong, (config.degrees_in_words, config.layout, config.checkpoint, wrong)


IN_HALF = [(name, "heads", torch.bfloat16) for name in FAMILIES if name != "bamba"]
"""Mamba-2's torch function gives float32 then, its kernels what they are given."""


@pytest.mark.parametrize(
    ("family", "way", "dtype"),
    [
        *product(FAMILIES, get_args(RecurrentWay), [torch.float32]),
        *[(name, "states", torch.float32) for name in ("lfm2",) if name in SUPPORTED],
        *IN_HALF,
    ],
)
def test_each_layer_sends_what_its_config_says(
    family: str, way: RecurrentWay, dtype: torch.dtype
) -> None:
    """From the model's config, the row and the degrees alone."""
    config = LongContextConfig(ulysses_degree=2, ring_degree=2, recurrent_exchange=way)
    model: Any = featured_model(family).to(dtype)
    layers = recurrent_layers(model.config, itemsize=dtype.itemsize)
    assert layers is not None
    copies = [copy.deepcopy(model) for _ in range(4)]

    def on_one_rank(transport: VirtualTransport) -> tuple[Documents, list[Traffic], list[Traffic]]:
        handle = patch(copies[transport.group_rank], config, group=virtual_group(transport, config))
        documents: list[Documents] = []
        forward: list[Traffic] = []
        backward: list[Traffic] = []

        def note(where: list[Traffic]) -> None:
            where.append(Traffic(*handle.counters.sent_ever()))

        def before(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            documents.append(kwargs[transformers_api.CALL_KEY].documents)
            hidden = args[0] if args else kwargs["hidden_states"]
            hidden.register_hook(lambda _: note(backward))
            note(forward)

        def after(_: Any, __: Any, out: Any) -> None:
            note(forward)
            out.register_hook(lambda _: note(backward))

        for mixer in transformers_api.recurrent_modules(handle.model):
            mixer.register_forward_pre_hook(before, with_kwargs=True)
            mixer.register_forward_hook(after)
        handle.model(**whole_row(DOCUMENTS)).loss.backward()
        return documents[0], between(forward), between(backward)

    ranks = run_virtual_ranks(4, on_one_rank)
    wanted = layer_traffic(layers, row_of(config, ranks[0][0]), way)
    for rank, (_, forward, backward) in enumerate(ranks):
        assert forward == [wanted[rank].forward] * layers.num_layers
        assert backward == [wanted[rank].backward] * layers.num_layers
    assert any(traffic.forward.bytes for traffic in wanted)


def between(counted: list[Traffic]) -> list[Traffic]:
    """What was sent from each even entry to the odd one after it."""
    pairs = zip(counted[::2], counted[1::2], strict=True)
    return [Traffic(b.messages - a.messages, b.bytes - a.bytes) for a, b in pairs]


def test_the_first_step_says_what_was_exchanged_and_heads_that_do_not_divide_are_refused() -> None:
    model = featured_model("bamba")
    with pytest.raises(ValueError, match="'heads': 8 heads with a state are no multiple of ulysse"):
        patch(model, replace(HEADS, ulysses_degree=3))
    with pytest.raises(ValueError, match="recurrent_exchange='heads': LlamaForCausalLM has no rec"):
        patch(featured_model("llama"), HEADS)
    with pytest.raises(ValueError, match="recurrent_exchange='heads' with ulysses_degree=1: no ra"):
        LongContextConfig(recurrent_exchange="heads")
    with pytest.raises(ValueError, match="recurrent_exchange='head'"):
        LongContextConfig(recurrent_exchange="head")  # type: ignore[arg-type]
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_one_rank(transport: VirtualTransport) -> str:
        handle = patch(copies[transport.group_rank], HEADS, group=virtual_group(transport, HEADS))
        handle.model(**whole_row((LENGTH,))).loss.backward()
        return repr(handle.first_step)

    for says in run_virtual_ranks(2, on_one_rank):
        assert "recurrent with heads exchanged" in says
        assert says.startswith("<first step: 3 of 3 layers (1 with attention, 2 recurrent) over 2 ")
