"""Patched models under masks and windows over packed rows, compared with stock eager attention.

The reference runs every document alone, in one process, through the unpatched model: a packed row
has the sum of their losses and gradients. Other masks reach the stock model as a ready-made 4-D
additive mask.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.data.descriptor import Descriptor
from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import LayoutName
from longctx_patch.sequence.masks import Mask, bidirectional, block_sparse, prefix_lm
from tests.hf.features import VOCABULARY, WINDOW
from tests.hf.steps import Rows, Step, collated, complaints, sharded_step
from tests.hf.tiny import featured_model, gradients

Table = NDArray[np.bool_]
Ints = NDArray[np.int64]
Pack = tuple[int, ...]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("gpt_oss", {}),
    "mistral": ("mistral", {}),
}
"""No window; a window in one layer; that and sinks; a window in every layer."""


class Case(NamedTuple):
    """A batch of packed rows through a model."""

    model: str
    packs: tuple[Pack, ...]
    """Lengths of the documents of each row."""
    pad_to: int = 0
    ulysses: int = 1
    ring: int = 1
    layout: LayoutName | None = None
    checkpoint: CheckpointPolicy = "none"
    window: int = WINDOW
    mask: str | None = None
    """A name in `MASKS`."""

    @property
    def config(self) -> LongContextConfig:
        return LongContextConfig(
            ulysses_degree=self.ulysses,
            ring_degree=self.ring,
            layout=self.layout,
            checkpoint=self.checkpoint,
        )

    @property
    def lengths(self) -> Pack:
        """Lengths of the documents of all rows, which the collator joins."""
        return tuple(length for pack in self.packs for length in pack)

    @property
    def num_tokens(self) -> int:
        """Length of the padded row."""
        real = max(sum(self.lengths), self.pad_to)
        multiple = self.ulysses * self.ring
        if self.layout == "zigzag" or len(self.lengths) == 1:
            multiple *= 2 if self.ring > 1 else 1
        return -(-real // multiple) * multiple

    @property
    def documents(self) -> Documents:
        return Documents.of_row(self.lengths, self.num_tokens)


def make_model(name: str, window: int = WINDOW) -> Any:
    family, overrides = MODELS[name]
    if family != "llama":
        overrides = overrides | {"sliding_window": window}
    return featured_model(family, **overrides)


# Masks over a padded row, each with the table of the (query, key) pairs that it allows.


def is_seen(row: Ints, column: Ints) -> Table:
    """About half of the blocks; always those on the diagonal, so that every token sees itself."""
    return ((row * 3 + column * 5) % 7 < 3) | (row == column)


def queries_and_keys(num_tokens: int) -> tuple[Ints, Ints]:
    return np.arange(num_tokens)[:, None], np.arange(num_tokens)[None, :]


def blocks_of(num_tokens: int, size: int) -> Table:
    return is_seen(*queries_and_keys(-(-num_tokens // size)))


MASKS: dict[str, tuple[Callable[[int], Mask], Callable[[Ints, Ints], Table]]] = {
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


def table_of(mask: str, num_tokens: int) -> Table:
    return MASKS[mask][1](*queries_and_keys(num_tokens))


# The reference in one process: every document alone, through the stock model.


def document_ids(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def additive(table: Table) -> Tensor:
    """`[1, 1, queries, keys]`: 0 where a query sees the key."""
    seen = torch.from_numpy(table)
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]


def stock_mask(model: Any, table: Table, window: int) -> Tensor | dict[str, Tensor]:
    """The 4-D mask, or one for each kind of layer that the model has; windows only reach back."""
    q, k = queries_and_keys(len(table))
    full, sliding = additive(table), additive(table & (q - k < window))
    if model.config.model_type == "llama":
        return full
    if model.config.model_type == "mistral":
        return sliding
    return {"full_attention": full, "sliding_attention": sliding}


@cache
def documents_alone(
    name: str, lengths: Pack, window: int, mask: str | None, num_tokens: int
) -> Step:
    """The summed loss of all documents divided by the number of labels, and its gradients."""
    model = make_model(name, window)
    table = None if mask is None else table_of(mask, num_tokens)
    count, total, start = sum(length - 1 for length in lengths), torch.zeros(()), 0
    for ids in document_ids(lengths):
        here = slice(start, start + len(ids))
        options = {} if table is None else {
            "attention_mask": stock_mask(model, table[here, here], window)
        }  # fmt: skip
        logits = model(input_ids=torch.tensor([ids]), use_cache=False, **options).logits[0]
        total = total + cross_entropy(logits[:-1], torch.tensor(ids[1:]).long(), reduction="sum")
        start += len(ids)
    (total / max(1, count)).backward()
    return Step((total / max(1, count)).detach(), gradients(model))


def wanted(case: Case) -> Step:
    # Only masks depend on the padded length.
    num_tokens = case.num_tokens if case.mask else 0
    return documents_alone(case.model, case.lengths, case.window, case.mask, num_tokens)


# Several processes with the packed rows.


def packed_rows(packs: Sequence[Pack]) -> Rows:
    documents = iter(document_ids([length for pack in packs for length in pack]))
    return [
        {
            "input_ids": [token for _ in pack for token in next(documents)],
            "seq_lengths": list(pack),
        }
        for pack in packs
    ]


def packed_step(case: Case, model: Any, handle: PatchHandle) -> Step:
    batch = collated(handle, packed_rows(case.packs), pad_to_length=case.pad_to)
    assert Descriptor.read(batch["longctx_shard"]).length == case.num_tokens
    assert batch["input_ids"].shape[1] * handle.config.sequence_degree == case.num_tokens
    return sharded_step(model, batch)


def run_cases(rank: int, cases: Sequence[Case]) -> list[Step]:
    """Run the cases; equal models are patched once. Only rank 0 returns steps, since means over
    ranks are the same on each."""
    patched: dict[tuple[Any, ...], tuple[Any, PatchHandle]] = {}
    steps = []
    for case in cases:
        key = (case.model, case.window, case.mask, case.config)
        if key not in patched:
            model = make_model(case.model, case.window)
            mask = None if case.mask is None else MASKS[case.mask][0]
            patched[key] = model, patch(model, case.config, mask=mask)
        steps.append(packed_step(case, *patched[key]))
    return steps if rank == 0 else []


def assert_equal(found: Sequence[Step], cases: Sequence[Case]) -> None:
    pairs = zip(found, cases, strict=True)
    wrong = [why for step, case in pairs for why in complaints(step, wanted(case), case)]
    assert not wrong, "\n".join(wrong)
