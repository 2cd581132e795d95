"""Packed rows, windows and other masks in patched models over processes, against stock eager.

The reference runs every document alone, in one process, through the unpatched model: a packed row
has the sum of their losses and gradients. Other masks reach the stock model as a ready-made 4-D
additive mask.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from longctx_patch import (
    LongContextConfig,
    PatchHandle,
    SequenceShardCollator,
    UnsupportedModelError,
    patch,
)
from longctx_patch.config import CheckpointPolicy, LayoutName
from longctx_patch.documents import Documents
from longctx_patch.masks import Mask, bidirectional, block_sparse, causal, prefix_lm
from longctx_patch.placement import place, placement_of
from tests.harness import run_distributed
from tests.hf.tiny import VOCABULARY, featured_model, gradients
from tests.reference import relative_error

TOLERANCE = 1e-5
WINDOW = 7
SHARE = 12
"""Tokens of a rank in most rows here."""

Table = NDArray[np.bool_]
Pack = tuple[int, ...]
LAYOUTS: tuple[LayoutName | None, ...] = (None, "zigzag", "contiguous")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("gpt_oss", {}),
    "mistral": ("mistral", {}),
}
"""Without a window, with one in one layer, with sinks too, and with one in every layer."""
TRAINED = ("llama", "qwen2", "gpt_oss")


class Step(NamedTuple):
    loss: Tensor
    grads: dict[str, Tensor]


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
            ulysses_waves=2,
            ring_degree=self.ring,
            layout=self.layout,
            checkpoint=self.checkpoint,
        )

    @property
    def lengths(self) -> Pack:
        """Documents of the folded row."""
        return tuple(length for pack in self.packs for length in pack)

    @property
    def num_tokens(self) -> int:
        """Of the padded row."""
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


# Masks over a padded row, each with its table by definition.


def blocks_of(num_tokens: int, size: int) -> Table:
    """About half of the blocks, those on the diagonal always, so that every token sees itself."""
    count = -(-num_tokens // size)
    row, column = np.arange(count)[:, None], np.arange(count)[None, :]
    return ((row * 3 + column * 5) % 7 < 3) | (row == column)


def queries_and_keys(num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.arange(num_tokens)[:, None], np.arange(num_tokens)[None, :]


def prefix_table(n: int) -> Table:
    q, k = queries_and_keys(n)
    return (k <= q) | (k < 17)


def both_ways_table(n: int) -> Table:
    return np.ones((n, n), dtype=np.bool_)


def blocks_table(n: int) -> Table:
    q, k = queries_and_keys(n)
    return blocks_of(n, 5)[q // 5, k // 5] & (k <= q)


def wide_blocks_table(n: int) -> Table:
    q, k = queries_and_keys(n)
    return blocks_of(n, 8)[q // 8, k // 8]


MASKS: dict[str, tuple[Callable[[int], Mask], Callable[[int], Table]]] = {
    "prefix": (lambda n: prefix_lm(n, 17), prefix_table),
    "both ways": (bidirectional, both_ways_table),
    "blocks": (lambda n: block_sparse(n, blocks_of(n, 5), 5), blocks_table),
    "blocks both ways": (
        lambda n: block_sparse(n, blocks_of(n, 8), 8, is_causal=False),
        wide_blocks_table,
    ),
}


# One process: every document alone, through the stock model.


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As the processes have: tiny tensors only wait for more of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def document_ids(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def additive(table: Table) -> Tensor:
    """`[1, 1, queries, keys]`: 0 where a key is seen."""
    seen = torch.from_numpy(table)
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]


def stock_mask(model: Any, table: Table, window: int) -> Tensor | dict[str, Tensor]:
    """For models with kinds of layers, a mask for each kind; windows reach back only."""
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
    """The loss of all documents over the number of labels, and its gradients."""
    model = make_model(name, window)
    table = None if mask is None else MASKS[mask][1](num_tokens)
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
    # A mask depends on the padded length; without one it is all the same.
    num_tokens = case.num_tokens if case.mask else 0
    return documents_alone(case.model, case.lengths, case.window, case.mask, num_tokens)


# Several processes: the packed rows.


def packed_rows(packs: Sequence[Pack]) -> list[dict[str, list[int]]]:
    documents = iter(document_ids([length for pack in packs for length in pack]))
    return [
        {
            "input_ids": [token for _ in pack for token in next(documents)],
            "seq_lengths": list(pack),
        }
        for pack in packs
    ]


def sharded_step(case: Case, model: Any, handle: PatchHandle) -> Step:
    """What all ranks together computed."""
    collate = SequenceShardCollator(
        case.config, group_rank=handle.group_rank, pad_token_id=0, pad_to_length=case.pad_to
    )
    batch = collate(packed_rows(case.packs))
    assert batch["longctx_shard"][0, 0] == case.num_tokens
    assert batch["input_ids"].shape[1] * handle.config.sequence_degree == case.num_tokens
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return over_ranks(loss, model)


def over_ranks(loss: Tensor, model: Any) -> Step:
    """The means, in one message."""
    grads = gradients(model)
    if not dist.is_initialized():
        return Step(loss.detach(), grads)
    flat = torch.cat([loss.detach().view(1), *(grad.flatten() for grad in grads.values())])
    dist.all_reduce(flat)
    total, *parts = (flat / dist.get_world_size()).split(
        [1, *(grad.numel() for grad in grads.values())]
    )
    shaped = {
        name: part.view_as(grad) for (name, grad), part in zip(grads.items(), parts, strict=True)
    }
    return Step(total[0], shaped)


def run_cases(rank: int, cases: Sequence[Case]) -> list[Step]:
    """Models that are patched alike are patched once. Only the first rank's steps are compared:
    means are the same everywhere."""
    patched: dict[tuple[Any, ...], tuple[Any, PatchHandle]] = {}
    steps = []
    for case in cases:
        key = (case.model, case.window, case.mask, case.config)
        if key not in patched:
            model = make_model(case.model, case.window)
            mask = None if case.mask is None else MASKS[case.mask][0]
            patched[key] = model, patch(model, case.config, mask=mask)
        steps.append(sharded_step(case, *patched[key]))
    return steps if rank == 0 else []


def complaints(found: Step, case: Case) -> Iterator[str]:
    expected = wanted(case)
    if (error := relative_error(found.loss, expected.loss)) >= TOLERANCE:
        yield f"{case}: loss differs by {error:.1e}"
    if found.grads.keys() != expected.grads.keys():
        yield f"{case}: gradients of other parameters"
        return
    errors = {
        name: relative_error(found.grads[name], grad) for name, grad in expected.grads.items()
    }
    wrong = [name for name, error in errors.items() if not error < TOLERANCE]
    if wrong:
        worst = max(wrong, key=lambda name: errors[name])
        yield f"{case}: {len(wrong)} gradients differ, {worst} by {errors[worst]:.1e}"


# The cases.


def packs_of(num_ranks: int) -> dict[str, Case]:
    """Rows of `SHARE` tokens a rank, with what is awkward about each."""
    n, share = num_ranks * SHARE, SHARE
    middle = (share,) * (num_ranks - 2)
    made = {
        "on the edges": ((share,) * num_ranks,),
        "one before": ((share - 1, *middle, share + 1),) if num_ranks > 1 else ((share - 1,),),
        "one after": ((share + 1, *middle, share - 1),) if num_ranks > 1 else ((share, 1),),
        "tiny and one longer than a share": ((1, 1, 1, n - 9, 1, 2, 1, 1, 1),),
        "two rows": ((4, 1, n // 2 - 5), (n // 2 - 4, 4)),
        "mostly padding": ((5, 1, 3),),
    }
    return {name: Case("", packs, pad_to=n) for name, packs in made.items()}


def cases_of(ulysses: int, ring: int) -> list[Case]:
    """Each row in each of three models, the placements in turn."""
    rows = packs_of(ulysses * ring).values()
    return [
        case._replace(model=model, ulysses=ulysses, ring=ring, layout=LAYOUTS[(at + number) % 3])
        for (at, model), (number, case) in product(enumerate(TRAINED), enumerate(rows))
    ]


def placement_cases(ring: int) -> list[Case]:
    """Each row in each placement."""
    return [
        case._replace(model="llama", ring=ring, layout=layout)
        for case, layout in product(packs_of(ring).values(), LAYOUTS)
    ]


def policy_cases(ulysses: int, ring: int) -> list[Case]:
    row = packs_of(ulysses * ring)["tiny and one longer than a share"]
    policies: tuple[CheckpointPolicy, ...] = ("full", "attention")
    return [
        row._replace(model=model, ulysses=ulysses, ring=ring, checkpoint=policy)
        for model, policy in product(TRAINED, policies)
    ]


def mask_cases(ulysses: int, ring: int) -> list[Case]:
    """One document, one with padding, and packed ones, under every mask; each mask in models
    with a window too, with one of these rows."""
    rows: list[tuple[Pack, int]] = [((48,), 0), ((41,), 48), ((3, 20, 1, 19), 48)]
    found = []
    for (turn, mask), (at, model), (number, (pack, pad_to)) in product(
        enumerate(MASKS), enumerate(TRAINED), enumerate(rows)
    ):
        if (model == "llama" and ulysses == 1) or (turn + at + number) % 3 == 0:
            layout = LAYOUTS[(turn + at + ulysses) % 3]
            found.append(Case(model, (pack,), pad_to, ulysses, ring, layout, mask=mask))
    return found


def window_cases(ring: int) -> list[Case]:
    """Windows between a shard and a row, one that leaves out a single pair, of a whole document,
    and longer than every document. The last token has no label: its pairs change nothing."""
    n = ring * SHARE
    windows = {"mistral": (1, SHARE, SHARE + 5, n - 2), "qwen2": (SHARE + 5, n - 2, n, n + 5)}
    row = (4, SHARE + 3, n - SHARE - 9, 2)
    longest = max(row)
    found = [
        Case(model, ((n,),), ring=ring, window=window)
        for model, of_model in windows.items()
        for window in of_model
    ]
    return found + [
        Case("qwen2", (row,), ring=ring, window=window)
        for window in (longest - 2, longest, longest + 1)
    ]


def assert_equal(found: Sequence[Step], cases: Sequence[Case]) -> None:
    wrong = [why for step, case in zip(found, cases, strict=True) for why in complaints(step, case)]
    assert not wrong, "\n".join(wrong)


CASES = {
    1: cases_of(1, 1) + mask_cases(1, 1),
    2: cases_of(1, 2) + policy_cases(1, 2),
    3: cases_of(1, 3) + mask_cases(1, 3),
    4: placement_cases(4)
    + cases_of(2, 2)
    + policy_cases(2, 2)
    + mask_cases(2, 2)
    + window_cases(4),
}


def test_one_rank_equals_the_documents_alone() -> None:
    assert_equal(run_cases(0, CASES[1]), CASES[1])


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_equal_the_documents_alone(num_ranks: int) -> None:
    cases = CASES[num_ranks]
    assert_equal(run_distributed(run_cases, num_ranks, cases, timeout_s=120)[0], cases)


def test_the_cases_have_what_is_awkward() -> None:
    """Boundaries on, one before and one after an edge of a rank, in every placement; whole ranks
    of padding; documents beyond a share; every policy."""
    seen: Counter[tuple[str, int]] = Counter()
    for case in [case for cases in CASES.values() for case in cases if case.ring > 1]:
        config, row = case.config, case.documents
        name = placement_of(config, row)
        layout = place(name, row, ring=case.ring, ulysses=case.ulysses)
        edges = {i.start for rank in layout.intervals for i in rank} - {0}
        for boundary, edge in product(row.edges[1:], edges):
            seen[name, boundary - edge] += not row.is_one
        for rank in range(layout.num_ranks):
            seen["a rank of padding", 0] += int(layout.positions(rank).min()) >= row.edges[-1]
        seen["a long one", 0] += not row.is_one and max(row.lengths) > max(layout.sizes)
        seen[case.checkpoint, 0] += 1
    for layout_name, offset in product(("balanced", "zigzag", "contiguous"), (-1, 0, 1)):
        assert seen[layout_name, offset] >= 3, (layout_name, offset)
    for what in ("a rank of padding", "a long one", "full", "attention"):
        assert seen[what, 0] >= 3, what
    assert {case.model for case in CASES[4]} == set(MODELS)


@pytest.mark.parametrize("mask", MASKS)
def test_the_masks_matter(mask: str) -> None:
    """Else comparing with them would show nothing."""
    plain, masked = (documents_alone("llama", (48,), WINDOW, name, 48) for name in (None, mask))
    assert relative_error(masked.loss, plain.loss) > 100 * TOLERANCE


def test_the_windows_matter() -> None:
    lengths = (4, 15, 27, 2)
    narrow, document, wide = (
        documents_alone("qwen2", lengths, window, None, 0) for window in (25, 27, 1000)
    )
    errors = [relative_error(narrow.grads[name], grad) for name, grad in wide.grads.items()]
    assert max(errors) > 100 * TOLERANCE
    assert torch.equal(document.loss, wide.loss)


# Several rows that are not packed: one mask for all of them.


def unpacked_step(config: LongContextConfig, lengths: Pack, mask: str) -> Step:
    model = make_model("llama")
    handle = patch(model, config, mask=MASKS[mask][0])
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    loss = model(**collate([{"input_ids": ids} for ids in document_ids(lengths)])).loss
    loss.backward()
    handle.unpatch()
    return over_ranks(loss, model)


def check_unpacked(rank: int) -> list[tuple[Pack, str, Step]]:
    """Rows of equal length under masks that see ahead, of any length under those that don't."""
    config = LongContextConfig(ring_degree=2)
    cases = [((24, 24), "both ways"), ((24, 24), "prefix"), ((24, 17), "blocks")]
    return [(lengths, mask, unpacked_step(config, lengths, mask)) for lengths, mask in cases]


def rows_alone(lengths: Pack, mask: str) -> Step:
    """Each row from the first token of the mask on."""
    model = make_model("llama")
    table, total = MASKS[mask][1](max(lengths)), torch.zeros(())
    for ids in document_ids(lengths):
        own = stock_mask(model, table[: len(ids), : len(ids)], WINDOW)
        logits = model(input_ids=torch.tensor([ids]), attention_mask=own, use_cache=False).logits
        total = total + cross_entropy(logits[0, :-1], torch.tensor(ids[1:]), reduction="sum")
    loss = total / sum(length - 1 for length in lengths)
    loss.backward()
    return Step(loss.detach(), gradients(model))


# Refusals.


def refusals(handle: PatchHandle, model: Any, rank: int) -> None:
    """With a plain patched model; each is on every rank and before anything is sent."""
    config = handle.config
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    packed = collate(packed_rows(((3, 9, 1, 11),)))
    layout = handle.group.layout(int(packed["longctx_shard"][0, 0]))
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
        ({"cu_seq_lens_q": torch.tensor([0, 3, 12])}, r"cu_seq_lens_q=tensor \[3\]"),
        ({"max_length_q": 12}, "max_length_q=12"),
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"softcap": 30.0}, r"softcap=30\.0"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"patch\(model, config, mask=...\)"),
    ]
    for changed, message in bad:
        handle.counters.reset()
        with pytest.raises(ValueError, match=message):
            model(**packed | changed)
        assert handle.counters.messages == 0
    # The lengths of documents are compared too: another cut of the same tokens.
    other = collate(packed_rows(((3, 9, 1, 11) if rank else (3, 10, 11),)))
    with pytest.raises(ValueError, match="must hold shards of the same batch"):
        model(**other)
    model(**packed).loss.backward()  # still works
    model(**packed | {"position_ids": None}).loss.backward()


def refused_masks(config: LongContextConfig, rank: int) -> None:
    uneven = [{"input_ids": ids} for ids in document_ids((12, 9))]
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
        collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
        with pytest.raises(ValueError, match=message):
            model(**collate(uneven))
        assert handle.counters.messages == 0
        handle.unpatch()


def dropout_after_patch(config: LongContextConfig) -> None:
    """Nothing looks at the modules again, but what a layer asks for is never dropped."""
    model = make_model("qwen2")
    handle = patch(model, config)
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"Qwen2Attention of layer 1 asks .* dropout=0\.1"):
        model(**collate(packed_rows(((3, 9),))))
    handle.unpatch()


def adapters_that_prepend(config: LongContextConfig) -> None:
    """Before the patch by their kind; after it because the batch no longer is the collator's."""
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match=r"PREFIX_TUNING.*Use LoRA"):
        patch(get_peft_model(make_model("llama"), prefix), config)
    model = make_model("llama")
    handle = patch(model, config)
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    adapted = get_peft_model(model, prefix)
    with pytest.raises(ValueError, match=r"past_key_values|attention_mask|position_ids"):
        adapted(**collate(packed_rows(((3, 9),))))
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
    adapters_that_prepend(config)


def check_two_ranks(rank: int) -> tuple[list[Step], list[tuple[Pack, str, Step]]]:
    """All that two processes are asked for, since starting them takes longest."""
    check_refusals(rank)
    return run_cases(rank, CASES[2]), check_unpacked(rank)


def test_two_ranks_equal_the_documents_alone_and_refuse_what_would_be_dropped() -> None:
    packed, unpacked = run_distributed(check_two_ranks, 2)[0]
    assert_equal(packed, CASES[2])
    for lengths, mask, found in unpacked:
        expected = rows_alone(lengths, mask)
        assert relative_error(found.loss, expected.loss) < TOLERANCE
        for name, grad in expected.grads.items():
            assert relative_error(found.grads[name], grad) < TOLERANCE, (lengths, mask, name)
