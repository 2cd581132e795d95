"""Masked models in two processes: packed rows, rows that are not packed, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch.nn.functional import cross_entropy

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.data.descriptor import Descriptor
from longctx_patch.sequence.masks import bidirectional, block_sparse, causal, prefix_lm
from tests.harness import run_distributed
from tests.hf.features import WINDOW
from tests.hf.masked_cases import CASES
from tests.hf.masked_models import (
    MASKS,
    Pack,
    assert_equal,
    blocks_of,
    document_ids,
    make_model,
    packed_rows,
    run_cases,
    stock_mask,
    table_of,
)
from tests.hf.steps import Rows, Step, collated, complaints, sharded_step
from tests.hf.tiny import gradients

# Several rows that are not packed have one mask for all of them.


def whole_rows(lengths: Pack) -> Rows:
    return [{"input_ids": ids} for ids in document_ids(lengths)]


def unpacked_step(config: LongContextConfig, lengths: Pack, mask: str) -> Step:
    model = make_model("llama")
    handle = patch(model, config, mask=MASKS[mask][0])
    step = sharded_step(model, collated(handle, whole_rows(lengths)))
    handle.unpatch()
    return step


def check_unpacked(rank: int) -> list[tuple[Pack, str, Step]]:
    """Rows of equal length if the mask lets tokens see later ones, else of any length."""
    config = LongContextConfig(ring_degree=2)
    cases = [((24, 24), "both ways"), ((24, 24), "prefix"), ((24, 17), "blocks")]
    return [(lengths, mask, unpacked_step(config, lengths, mask)) for lengths, mask in cases]


def rows_alone(lengths: Pack, mask: str) -> Step:
    """The reference: each row alone, under the top left corner of the mask."""
    model = make_model("llama")
    table, total = table_of(mask, max(lengths)), torch.zeros(())
    for ids in document_ids(lengths):
        own = stock_mask(model, table[: len(ids), : len(ids)], WINDOW)
        logits = model(input_ids=torch.tensor([ids]), attention_mask=own, use_cache=False).logits
        total = total + cross_entropy(logits[0, :-1], torch.tensor(ids[1:]), reduction="sum")
    loss = total / sum(length - 1 for length in lengths)
    loss.backward()
    return Step(loss.detach(), gradients(model))


# Refusals.


def refusals(handle: PatchHandle, model: Any, rank: int) -> None:
    """A model patched without a mask refuses on every rank, before anything is sent."""
    packed = collated(handle, packed_rows(((3, 9, 1, 11),)))
    layout = handle.group.layout(Descriptor.read(packed["longctx_shard"]).length)
    whole_positions = layout.positions(handle.group_rank)[None]
    local_positions = torch.arange(packed["input_ids"].shape[1])[None]

    def first_wrong(given: Any) -> str:
        pairs = zip(given[0].tolist(), packed["position_ids"][0].tolist(), strict=True)
        index, (found, wanted) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
        return rf"position_ids\[0, {index}\] is {found}, but .* has position {wanted}"

    bad: list[tuple[dict[str, Any], str]] = [
        ({"position_ids": whole_positions}, f"{first_wrong(whole_positions)}.* in its document"),
        ({"position_ids": local_positions}, f"{first_wrong(local_positions)}.*another config"),
        ({"position_ids": packed["position_ids"] + 1}, "pass the collator's position_ids, or none"),
        ({"position_ids": packed["position_ids"][None]}, r"position_ids \[1, 1, .* tokens of this"),
        ({"sparse_kernel": "fast"}, "sparse_kernel='fast' with a sharded batch"),
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"softcap": 30.0}, r"softcap=30\.0"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"patch\(model, config, mask=...\)"),
    ]
    for changed, message in bad:
        handle.counters.reset()
        with pytest.raises(ValueError, match=message):
            model(**packed | changed)
        assert handle.counters.messages == 0
    # Ranks compare the lengths of documents too; here the same tokens are cut differently.
    other = collated(handle, packed_rows(((3, 9, 1, 11) if rank else (3, 10, 11),)))
    with pytest.raises(ValueError, match="must hold shards of the same batch"):
        model(**other)
    model(**packed).loss.backward()  # the model still works
    model(**packed | {"position_ids": None}).loss.backward()


def refused_masks(config: LongContextConfig, rank: int) -> None:
    cases: list[tuple[Callable[[int], Any], str]] = [
        (bidirectional, r"would see the padding .*\[12, 9\] of 12 .*packed=True"),
        (lambda n: prefix_lm(n, 3), "let.* tokens see later ones"),
        (
            lambda n: causal(n + 1),
            "gave 'causal' over 13 tokens for 12 tokens: it returns a Mask over as many tokens",
        ),
        (lambda n: np.ones((n, n)), "for 12 tokens: it returns a Mask"),
        (lambda n: None, "the mask function gave None"),
        (lambda n: prefix_lm(n, 0) if rank else block_sparse(n, blocks_of(n, 3), 3), "same batch"),
    ]
    for factory, message in cases:
        model = make_model("llama")
        handle = patch(model, config, mask=factory)
        with pytest.raises(ValueError, match=message):
            model(**collated(handle, whole_rows((12, 9))))
        assert handle.counters.messages == 0
        handle.unpatch()


def dropout_after_patch(config: LongContextConfig) -> None:
    """Dropout that a module gets after the patch is refused when its layer asks for it."""
    model = make_model("qwen2")
    handle = patch(model, config)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"Qwen2Attention of layer 1 asks .* dropout=0\.1"):
        model(**collated(handle, packed_rows(((3, 9),))))
    handle.unpatch()


def adapter_that_prepends(config: LongContextConfig) -> None:
    """A prefix adapter added after the patch changes the batch, which is refused. An adapter added
    before is tested in test_patching.py."""
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    handle = patch(make_model("llama"), config)
    adapted = get_peft_model(handle.model, prefix)
    with pytest.raises(ValueError, match=r"cache|attention_mask|position_ids"):
        adapted(**collated(handle, packed_rows(((3, 9),))))
    assert handle.counters.messages == 0
    handle.unpatch()


def check_refusals(rank: int) -> None:
    config = LongContextConfig(ring_degree=2)
    model = make_model("llama")
    handle = patch(model, config)
    refusals(handle, model, rank)
    handle.unpatch()
    refused_masks(config, rank)
    dropout_after_patch(config)
    adapter_that_prepends(config)


# Unpacked rows, refusals and the packed rows in one start.


def check_two_ranks(rank: int) -> tuple[list[Step], list[tuple[Pack, str, Step]]]:
    """All checks on two ranks, in one start of the processes, which takes longest."""
    check_refusals(rank)
    return run_cases(rank, CASES[2]), check_unpacked(rank)


def test_two_ranks_equal_the_documents_alone_and_refuse_what_would_be_dropped() -> None:
    packed, unpacked = run_distributed(check_two_ranks, 2)[0]
    assert_equal(packed, CASES[2])
    for lengths, mask, found in unpacked:
        assert not complaints(found, rows_alone(lengths, mask), (lengths, mask))
