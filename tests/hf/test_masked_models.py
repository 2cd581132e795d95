"""Packed rows, windows and other masks in patched models equal stock eager attention under a dense
table of who sees whom, in float64; on two processes the collator's shards do, and what a mask can't
be is refused there."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.data.descriptor import Descriptor
from longctx_patch.sequence.masks import Mask, bidirectional, block_sparse, causal, prefix_lm
from longctx_patch.verification.shrink import keep_float64
from tests.harness import run_distributed
from tests.hf import float64
from tests.hf.features import WINDOW
from tests.hf.float64 import stock_loss, whole_row
from tests.hf.steps import Rows, Step, collated, complaints, sharded_step, step_of_ranks
from tests.hf.tiny import featured_model, gradients, token_rows
from tests.masked import Table, same_document

Ints = NDArray[np.int64]
Lengths = tuple[int, ...]

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"layer_types": ["sliding_attention", "full_attention"]},
    "granite_swa": {},
    "mistral": {},
}
"""No window; a window in one layer; that and sinks; a window in every layer."""


def model_of(family: str, window: int = WINDOW) -> Any:
    options = {} if family == "llama" else {"sliding_window": window}
    return featured_model(family, **MODELS.get(family, {}) | options)


def is_seen(row: Ints, column: Ints) -> Table:
    """About half of the blocks; always those on the diagonal, so that every token sees itself."""
    return ((row * 3 + column * 5) % 7 < 3) | (row == column)


def pairs_of(num_tokens: int) -> tuple[Ints, Ints]:
    return np.arange(num_tokens)[:, None], np.arange(num_tokens)[None, :]


def blocks_of(num_tokens: int, size: int) -> Table:
    return is_seen(*pairs_of(-(-num_tokens // size)))


MASKS: dict[str | None, tuple[Callable[[int], Mask] | None, Callable[[Ints, Ints], Table]]] = {
    None: (None, lambda q, k: k <= q),
    "prefix": (lambda n: prefix_lm(n, 17), lambda q, k: (k <= q) | (k < 17)),
    "both ways": (bidirectional, lambda q, k: q >= 0 * k),
    "blocks": (
        lambda n: block_sparse(n, blocks_of(n, 5), 5),
        lambda q, k: is_seen(q // 5, k // 5) & (k <= q),
    ),
    "blocks both ways": (
        lambda n: block_sparse(n, blocks_of(n, 8), 8, is_causal=False),
        lambda q, k: is_seen(q // 8, k // 8),
    ),
}
"""Each with the table of the (query, key) pairs that it allows."""


def stock_mask(model: Any, table: Table) -> Any:
    """The 4-D additive mask, or one for each kind of layer; windows only reach back."""

    def additive(seen: Table) -> Tensor:
        dtype = model.lm_head.weight.dtype
        hidden = torch.from_numpy(~seen)
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(hidden, -torch.inf)[None, None]

    q, k = pairs_of(len(table))
    window = getattr(model.config, "sliding_window", None) or len(table)
    full, sliding = additive(table), additive(table & (q - k < window))
    if model.config.model_type in ("llama", "mistral"):
        return sliding
    return {"full_attention": full, "sliding_attention": sliding}


def alone(model: Any, lengths: Lengths, mask: str | None) -> Step:
    """The step of the stock model over a row of documents."""
    model, n = copy.deepcopy(model), sum(lengths)
    table = same_document(lengths, n) & MASKS[mask][1](*pairs_of(n))
    loss = stock_loss(model, whole_row(lengths) | {"attention_mask": stock_mask(model, table)})
    loss.backward()
    return Step(loss.detach(), gradients(model))


def rows_of(num_ranks: int) -> list[Lengths]:
    """Edges of documents on, before and after those of shards of 12 tokens, a document that is
    longer than a shard, a prime length, which is padded, and ranks with hardly a token."""
    n, middle = 12 * num_ranks, (12,) * (num_ranks - 2)
    if num_ranks == 1:
        return [(11,), (12, 1), (4, 1, 7)]
    return [
        (12,) * num_ranks,
        (11, *middle, 13),
        (13, *middle, 11),
        (1, 1, 1, n - 9, 1, 2, 1, 1, 1),
        (n - 7, 2),
        (5, 1, 3),
    ]


WAYS = [{}, *float64.WAYS]


def assert_exact(
    family: str, way: dict[str, Any], lengths: Lengths, mask: str | None, window: int = WINDOW
) -> None:
    model, config = model_of(family, window), LongContextConfig(**way)
    keep_float64(model)
    found = step_of_ranks(model, config, whole_row(lengths), mask=MASKS[mask][0])
    where = family, way, lengths, mask
    assert not complaints(found, alone(model, lengths, mask), where, bound=1e-10)


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_packed_rows_under_every_mask(number: int) -> None:
    way, families = WAYS[number], list(MODELS)
    ranks = LongContextConfig(**way).sequence_degree
    for turn, lengths in enumerate(rows_of(ranks)):
        if "ring_degree" in way or turn % 2:  # without a ring no edge of a shard is in attention
            assert_exact(families[(turn + number) % 4], way, lengths, None)
    for turn, mask in enumerate([name for name in MASKS if name]):
        lengths = ((48,), (41,), (3, 20, 1, 19))[(turn + number) % 3]
        assert_exact(families[(turn + number) % 4], way, lengths, mask)


WINDOWS = {"mistral": (1, 12, 17, 46), "qwen2": (17, 46, 48, 53)}
"""Windows of one token, of about a shard, of all but a single pair of a row of 48, and longer."""


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_of_every_length(family: str) -> None:
    for window in WINDOWS[family]:
        assert_exact(family, {"ring_degree": 4}, (48,), None, window)
    for window in (25, 27, 28):
        assert_exact(family, {"ring_degree": 4}, (4, 15, 27, 2), None, window)


# Two processes.


def packed_rows(lengths: Lengths) -> Rows:
    ids = whole_row(lengths)["input_ids"][0].tolist()
    return [{"input_ids": ids, "seq_lengths": list(lengths)}]


def unpacked_rows(lengths: Lengths) -> Rows:
    rows = token_rows(max(lengths), len(lengths))
    return [{"input_ids": row["input_ids"][:n]} for row, n in zip(rows, lengths, strict=True)]


SHARDED: list[tuple[str, Lengths, str | None]] = [
    ("llama", (41,), "both ways"),
    ("gpt_oss", (3, 20, 1, 19), "prefix"),
    ("gpt_oss", (23, 1), None),
]
UNPACKED = [((24, 24), "both ways"), ((24, 24), "prefix"), ((24, 17), "blocks")]
"""Rows of equal length if the mask lets tokens see later ones, else of any length."""


def unpacked_alone(lengths: Lengths, mask: str) -> Step:
    """Each row under the top left corner of the mask."""
    model, total = model_of("llama"), torch.zeros(())
    for row in unpacked_rows(lengths):
        ids = torch.tensor([row["input_ids"]])
        own = stock_mask(model, MASKS[mask][1](*pairs_of(ids.shape[1])))
        batch = {"input_ids": ids, "labels": ids, "attention_mask": own}
        total = total + stock_loss(model, batch) * (ids.shape[1] - 1)
    loss = total / sum(length - 1 for length in lengths)
    loss.backward()
    return Step(loss.detach(), gradients(model))


def shards_step(
    config: LongContextConfig, rows: Rows, mask: str | None, family: str = "llama", **options: Any
) -> Step:
    model = model_of(family)
    handle = patch(model, config, mask=MASKS[mask][0])
    return sharded_step(model, collated(handle, rows, **options))


def refusals(handle: PatchHandle, model: Any, rank: int) -> None:
    """A model patched without a mask refuses on every rank, before anything is sent."""
    packed = collated(handle, packed_rows((3, 9, 1, 11)))
    layout = handle.group.layout(Descriptor.read(packed["longctx_shard"]).documents)
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
    other = collated(handle, packed_rows((3, 9, 1, 11) if rank else (3, 10, 11)))
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
        model = model_of("llama")
        handle = patch(model, config, mask=factory)
        with pytest.raises(ValueError, match=message):
            model(**collated(handle, unpacked_rows((12, 9))))
        assert handle.counters.messages == 0


def changed_after_patch(config: LongContextConfig) -> None:
    """Dropout that a module gets after the patch, and a prefix adapter, which changes the batch."""
    model = model_of("qwen2")
    handle = patch(model, config)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"Qwen2Attention of layer 1 asks .* dropout=0\.1"):
        model(**collated(handle, packed_rows((3, 9))))
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    handle = patch(model_of("llama"), config)
    adapted = get_peft_model(handle.model, prefix)
    with pytest.raises(ValueError, match=r"cache|attention_mask|position_ids"):
        adapted(**collated(handle, packed_rows((3, 9))))
    assert handle.counters.messages == 0


def check_two_ranks(rank: int) -> list[Step]:
    config = LongContextConfig(ring_degree=2)
    model = model_of("llama")
    refusals(patch(model, config), model, rank)
    refused_masks(config, rank)
    changed_after_patch(config)
    packed = [
        shards_step(config, packed_rows(lengths), mask, family, pad_to_length=48)
        for family, lengths, mask in SHARDED
    ]
    return packed + [shards_step(config, unpacked_rows(n), m) for n, m in UNPACKED]


def test_shards_on_two_processes_and_what_is_refused_there() -> None:
    found = run_distributed(check_two_ranks, 2)[0]
    wanted = [alone(model_of(family), lengths, mask) for family, lengths, mask in SHARDED]
    wanted += [unpacked_alone(*case) for case in UNPACKED]
    for step, other, case in zip(found, wanted, [*SHARDED, *UNPACKED], strict=True):
        assert not complaints(step, other, case)
