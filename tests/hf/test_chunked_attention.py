"""Llama 4: layers that attend in chunks of their document, and layers without rotary embeddings
that scale queries by their place. Each document by itself in the stock model is the reference."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.masking_utils import chunked_causal_mask_function

from longctx_patch import LongContextConfig, PatchHandle, UnsupportedModelError, patch
from longctx_patch.data.whole_rows import read_rows
from longctx_patch.engine.decided import row_mask
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.facts import ModelFacts, Reach, layer_kinds
from longctx_patch.hf.model.stock_model import stock_model
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import bidirectional
from tests.hf.float64 import in_float64, stock_step, whole_row
from tests.hf.steps import Step, collated, complaints, on_ranks, step_of_ranks
from tests.hf.tiny import featured_config, featured_model, gradients, token_rows
from tests.reference import relative_error

FAMILY, CHUNK = "llama4_text", 7
LENGTH = 43
DOCUMENTS = (1, 17, 3, 14, 8)
"""Shorter than a chunk, whole chunks, and some with a rest."""


def sharded_step(model: Any, config: LongContextConfig, lengths: tuple[int, ...]) -> Step:
    """The sum over all ranks of shards; each rank has sent what its plans say, to the byte."""
    row: Any = {"input_ids": token_rows(LENGTH, 1)[0]["input_ids"], "seq_lengths": list(lengths)}

    def run(model: Any, handle: PatchHandle) -> Step:
        batch = collated(handle, [row])
        labels = batch.pop("shift_labels")
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / (LENGTH - len(lengths))
        loss.backward()
        step, sent = handle.first_step, handle.counters
        if step is not None:
            assert step.masks == "chunk 7 + causal" + ", 5 documents" * (len(lengths) > 1)
            planned = step.planned_forward() + step.planned_backward()
            assert planned == Traffic(sent.messages, sent.bytes)
        return Step(loss.detach(), gradients(model))

    steps = on_ranks(model, config, run)
    names = steps[0].grads
    total = {name: torch.stack([step.grads[name] for step in steps]).sum(0) for name in names}
    return Step(torch.stack([step.loss for step in steps]).sum(), total)


CONFIGS = (
    LongContextConfig(),
    LongContextConfig(ring_degree=2),
    LongContextConfig(ring_degree=3, layout="contiguous", checkpoint="full"),
    LongContextConfig(ring_degree=4, layout="striped", checkpoint="attention"),
    LongContextConfig(ring_degree=4, layout="contiguous", plan="distflash_balanced"),
    LongContextConfig(ring_degree=4, ranks_per_node=2, plan="double_ring"),
    LongContextConfig(ulysses_degree=2, ring_degree=2, checkpoint="attention"),
    LongContextConfig(ulysses_degree=4),
)


@pytest.mark.parametrize("lengths", [(LENGTH,), DOCUMENTS], ids=["plain", "packed"])
def test_every_layout_and_plan_is_exact(lengths: tuple[int, ...]) -> None:
    model = in_float64(FAMILY)
    wanted = stock_step(copy.deepcopy(model), lengths)
    for config in CONFIGS:
        found = sharded_step(model, config, lengths)
        assert not complaints(found, wanted, config, bound=1e-10)


def test_the_mask_is_that_of_transformers_in_each_document() -> None:
    documents = Documents(DOCUMENTS[:-1], LENGTH)
    found = torch.from_numpy(row_mask(None, documents, None, CHUNK).dense())
    allows = chunked_causal_mask_function(CHUNK, torch.zeros(1, dtype=torch.int64))
    wanted = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for start, stop in pairwise(documents.edges):
        place = torch.arange(stop - start)
        wanted[start:stop, start:stop] = allows(0, 0, place[:, None], place[None, :])
    assert torch.equal(found, wanted)
    both_ways = row_mask(bidirectional(LENGTH), documents, None, CHUNK)
    assert torch.equal(torch.from_numpy(both_ways.dense()), wanted | wanted.T)


def test_chunks_that_end_where_shards_end_travel_nowhere() -> None:
    """Layers of chunks send nothing then, so only the layer between them does."""
    config = LongContextConfig(ring_degree=2, layout="contiguous")

    def sent(**changes: Any) -> int:
        found: list[int] = []

        def note(handle: PatchHandle) -> None:
            assert handle.first_step is not None
            found.append(handle.first_step.planned_forward().bytes)

        model = featured_model(FAMILY, attention_chunk_size=16, **changes)
        step_of_ranks(model, config, whole_row((32,)), note)
        return sum(found)

    assert sent(layer_types=["full_attention"] * 3) == 3 * sent() > 0


def test_whole_rows_that_transformers_counts_otherwise_are_refused() -> None:
    """It counts chunks and places from the start of the row, not of each document."""
    stock = stock_model(featured_model(FAMILY))
    read_rows(whole_row((2, 2)), stock)
    with pytest.raises(ValueError, match=r"row of 5 tokens: .* from the start of .* from 5 tokens"):
        read_rows(whole_row((2, 3)), stock)
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="padded on the right"):
        read_rows({"input_ids": mask, "attention_mask": mask}, stock)
    read_rows({"input_ids": mask, "attention_mask": mask.flip(1)}, stock)
    cool: dict[str, Any] = {"attn_temperature_tuning": False}
    with pytest.raises(ValueError, match="from 8 tokens on"):
        read_rows(whole_row((3, 5)), stock_model(featured_model(FAMILY, **cool)))
    assert stock_model(featured_model("llama")).counts_rows_from is None
    short = whole_row((2, 5))
    wanted = featured_model(FAMILY, **cool)(**short, use_cache=False).loss
    found = step_of_ranks(featured_model(FAMILY, **cool), LongContextConfig(ring_degree=2), short)
    assert relative_error(found.loss, wanted.detach()) < 1e-5


def test_stock_passes_and_router_logits_of_a_patched_model() -> None:
    """Generation counts by the cache as before; router logits come without a loss of theirs."""
    prompt = torch.tensor([token_rows(9)[0]["input_ids"]])
    stock, model = featured_model(FAMILY).eval(), featured_model(FAMILY).eval()
    handle = patch(model, LongContextConfig())
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), stock.generate(prompt, **options))
    model.train()
    batch = collated(handle, token_rows(20))
    plain, routed = model(**batch), model(**batch, output_router_logits=True)
    assert relative_error(plain.loss, routed.loss) < 1e-6  # one by transformers' own attention


def test_what_a_config_says_of_chunks() -> None:
    facts, kinds = ModelFacts.of(featured_config(FAMILY)), layer_kinds(featured_config(FAMILY))
    assert facts.reaches == [Reach(chunk=CHUNK), Reach(), Reach(chunk=CHUNK)]
    assert facts.reaches_in(CHUNK) == [Reach()] * 3
    assert facts.reaches_in(CHUNK + 1) == facts.reaches
    assert [layer.is_dense for layer in facts.layers] == [False, False, True]
    assert facts.unmeasured is None
    with pytest.raises(UnsupportedModelError, match=r"layer 0 is chunked_attention, but .*=None"):
        check_model_config(
            featured_config(FAMILY, attention_chunk_size=None, layer_types=list(kinds)),
            LongContextConfig(),
        )
    with pytest.raises(ValueError, match="chunk=0: a whole number of tokens"):
        Documents.one(3).cut(0)
