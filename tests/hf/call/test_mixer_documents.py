"""Kernels that keep documents apart themselves run those that lie whole on a rank in one call."""

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig
from longctx_patch.engine.chain import delta_rule
from longctx_patch.engine.chain.chain_run import checked_chain
from longctx_patch.engine.chain.delta_rule import DeltaRule
from longctx_patch.engine.chain.state_space import StateSpace
from longctx_patch.hf.model.sequence_kernels import functions_of, kernel_takes
from longctx_patch.hf.model.transformers_api import recurrent_modules
from longctx_patch.sequence.documents import Documents
from tests.hf.call.test_mixers import (
    CHAINED,
    DOCUMENTS,
    Function,
    assert_exact,
    install,
    install_kernels,
)
from tests.hf.float64 import in_float64, stock_step

FAMILIES = [
    name
    for name in ("qwen3_5_text", "kimi_linear", "olmo_hybrid", "bamba", "nemotron_h")
    if name in CHAINED
]
CONFIGS = (
    LongContextConfig(),
    LongContextConfig(ring_degree=2, layout="zigzag"),
    LongContextConfig(ring_degree=3, layout="contiguous", checkpoint="full"),
    LongContextConfig(ulysses_degree=2, recurrent_exchange="heads"),
)
Edges = list[int]


def rule_over(stock: Function, calls: list[Edges]) -> Function:
    """As fla's: documents by their edges, then without a batch. It notes those of each call."""

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        own = (q, k, v)
        if cu_seqlens is None:
            calls.append([0, q.shape[1]])
            options |= {"initial_state": initial_state, "output_final_state": output_final_state}
            found: tuple[Tensor, Tensor | None] = stock(*own, g=g, beta=beta, **options)
            return found
        assert len(q) == 1
        assert initial_state is None
        assert not output_final_state
        assert cu_seqlens.dtype == torch.int64
        edges = cu_seqlens.tolist()
        calls.append(edges)
        parts = [
            stock(*(x[:, a:b] for x in own), g=g[:, a:b], beta=beta[:, a:b], **options)[0]
            for a, b in pairwise(edges)
        ]
        return torch.cat(parts, dim=1), None

    return kernel


def scan_over(stock: Function, calls: list[Edges]) -> Function:
    """As mamba-ssm's: documents by a number for each token. It notes the edges of each call."""

    def kernel(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        **options: Any,
    ) -> Any:
        own, length = (x, dt, B, C), x.shape[1]
        if seq_idx is None:
            calls.append([0, length])
            options |= {"initial_states": initial_states}
            options |= {"return_final_states": return_final_states}
            return stock(x, dt, A, B, C, chunk_size, **options)
        assert initial_states is None
        assert not return_final_states
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == x.shape[:2]
        assert all(row.equal(seq_idx[0]) for row in seq_idx)
        begins = (seq_idx[0].diff() != 0).nonzero()[:, 0] + 1
        edges = [0, *begins.tolist(), length]
        calls.append(edges)
        parts = []
        for a, b in pairwise(edges):
            mine = [each[:, a:b] for each in own]
            parts.append(stock(*mine[:2], A, *mine[2:], chunk_size, **options))
        return torch.cat(parts, dim=1)

    return kernel


KERNELS = {
    "torch_chunk_gated_delta_rule": rule_over,
    "chunk_kimi_delta_attention": rule_over,
    "mamba2_chunk_scan": scan_over,
}


CASES = [
    (family, config)
    for turn, family in enumerate(FAMILIES)
    for number, config in enumerate(CONFIGS)
    if family == FAMILIES[0] or number == turn % len(CONFIGS)
]


@pytest.mark.parametrize(("family", "config"), CASES)
def test_documents_in_one_call_are_exact(
    family: str, config: LongContextConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_float64(family)
    wanted = stock_step(copy.deepcopy(model), DOCUMENTS)
    calls: list[Edges] = []

    def made(name: str, stock: Function) -> Function | None:
        return KERNELS[name](stock, calls) if name in KERNELS else None

    install_kernels(model, made, monkeypatch)
    assert_exact(model, config, DOCUMENTS, wanted)
    runs = len(recurrent_modules(model)) * (2 if config.checkpoint == "full" else 1)
    joined = [edges for edges in calls if len(edges) > 2]
    assert len(joined) == runs * joined_calls(config)
    if ring_and_ulysses(config) == 1:
        assert calls == [[0, *torch.tensor(DOCUMENTS).cumsum(0).tolist()]] * runs


def ring_and_ulysses(config: LongContextConfig) -> int:
    return config.ring_degree * config.ulysses_degree


def joined_calls(config: LongContextConfig) -> int:
    """Counts the calls of all ranks that run several documents."""
    documents, in_ring = Documents(DOCUMENTS, sum(DOCUMENTS)), config
    if config.recurrent_exchange == "heads":  # each rank runs what its Ulysses group holds
        in_ring = replace(config, ulysses_degree=1, recurrent_exchange="states")
    chain = checked_chain(in_ring.layout_of(documents), documents)
    calls = [call for rank in range(chain.num_ranks) for call in chain.runs(rank)]
    return sum(len(call) > 1 for call in calls) * (ring_and_ulysses(config) // chain.num_ranks)


@pytest.mark.parametrize(
    ("family", "name", "option"),
    [
        ("qwen3_5_text", "torch_chunk_gated_delta_rule", "cu_seqlens"),
        ("bamba", "mamba2_chunk_scan", "seq_idx"),
    ],
)
def test_what_a_kernel_does_not_name_is_not_given(family: str, name: str, option: str) -> None:
    """transformers drops it, and documents would run on into each other."""
    function = functions_of(recurrent_modules(in_float64(family))[0])[name]
    assert not kernel_takes(function, option)
    assert kernel_takes(install(function, KERNELS[name](function, [])), option)
    assert not kernel_takes(install(function, lambda *args, **options: None), option)


def test_layers_share_edges_but_not_with_an_evaluation() -> None:
    """fla keeps what it makes of the last ones, and what it has made in inference mode can't be
    saved for backward."""
    seen: list[Tensor] = []

    def rule(*_: Any, cu_seqlens: Tensor, **__: Any) -> Any:
        seen.append(cu_seqlens)
        return torch.zeros(1), None

    with torch.inference_mode():
        of_documents(rule, batch=1)
    of_documents(rule, batch=1)
    of_documents(rule, batch=1)
    assert all(edges.tolist() == [0, 1, 5] for edges in seen)
    assert seen[0].is_inference()
    assert not seen[1].is_inference()
    assert seen[1] is seen[2]


def of_documents(rule: Function, *, batch: int, takes: bool = True) -> Tensor | None:
    """Two documents, after two tokens of another one."""
    inputs = (torch.ones(batch, 7, 2, 8),) * 3 + (torch.ones(batch, 7, 2),) * 2
    return DeltaRule(rule, inputs, {}, lambda: takes).run_documents([2, 3, 7])


def test_documents_beyond_32_bits_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(*_: Any, **__: Any) -> Any:
        return torch.zeros(1), None

    numbers = 5 * 2 * 8  # of five tokens' queries
    monkeypatch.setattr(delta_rule, "MOST_PLACES", numbers)
    assert of_documents(rule, batch=1) is not None
    monkeypatch.setattr(delta_rule, "MOST_PLACES", numbers - 1)
    assert of_documents(rule, batch=1) is None


def test_a_batch_has_its_documents_one_by_one() -> None:
    def unused(*_: Any) -> Any:
        raise AssertionError

    assert of_documents(unused, batch=2) is None
    assert of_documents(unused, batch=1, takes=False) is None


def test_a_batch_of_rows_has_its_documents_in_one_scan() -> None:
    seen: list[Tensor] = []

    def scan(x: Tensor, *_: Any, seq_idx: Tensor, **__: Any) -> Tensor:
        seen.append(seq_idx)
        return x

    wide, narrow = torch.ones(2, 7, 4, 8), torch.ones(2, 7, 4)
    of_rows = StateSpace(
        scan, (wide, narrow, wide, wide), torch.ones(4), {"chunk_size": 4}, lambda: True
    )
    out = of_rows.run_documents([2, 3, 7])
    assert out is not None
    assert out.shape == (2, 5, 4, 8)
    of_rows.run_documents([2, 3, 7])
    assert seen[0].tolist() == [[0, 1, 1, 1, 1]] * 2
    assert seen[1] is seen[0]
