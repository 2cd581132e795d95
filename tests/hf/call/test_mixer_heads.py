"""What recurrent layers send whose states are handed on, or whose heads are exchanged for tokens;
their exactness is that of `tests/hf/test_states_and_latents.py`."""

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.families.recurrent_layers import layer_traffic, recurrent_layers
from longctx_patch.hf.model import transformers_api
from longctx_patch.planner.recurrent_cost import row_of
from longctx_patch.plans.recurrent import RecurrentWay
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from tests.hf.by_documents import whole_row
from tests.hf.call.test_mixers import DOCUMENTS, LENGTH
from tests.hf.on_ranks import on_ranks
from tests.hf.tiny import SUPPORTED, featured_model

HEADS = LongContextConfig(ulysses_degree=2, recurrent_exchange="heads")
FAMILIES = [name for name in ("qwen3_5_text", "bamba", "kimi_linear") if name in SUPPORTED]
"""Two key heads for four value heads; two groups for eight heads; a decay per channel."""


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

    def run(model: Any, handle: PatchHandle) -> tuple[Documents, list[Traffic], list[Traffic]]:
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

        for mixer in transformers_api.recurrent_modules(model):
            mixer.register_forward_pre_hook(before, with_kwargs=True)
            mixer.register_forward_hook(after)
        model(**whole_row(DOCUMENTS)).loss.backward()
        return documents[0], between(forward), between(backward)

    ranks = on_ranks(model, config, run)
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

    def say(model: Any, handle: PatchHandle) -> str:
        model(**whole_row((LENGTH,))).loss.backward()
        return repr(handle.first_step)

    for says in on_ranks(model, HEADS, say):
        assert "recurrent with heads exchanged" in says
        assert says.startswith("<first step: 3 of 3 layers (1 with attention, 2 recurrent) over 2 ")
