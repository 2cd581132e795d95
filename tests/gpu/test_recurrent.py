"""Recurrent layers with the kernels that are installed, in segments, against float64.

Splitting a sequence must not cost accuracy: an error is at most twice that of the same function
over the whole sequence, in the same dtype on one GPU. For models these are means over several of
them, since by luck the error of a few numbers can be small, and twice that of the mean gradient is
allowed as well.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from longctx_patch import LongContextConfig, make_sequence_group, patch
from longctx_patch.engine.chain.delta_rule import DeltaRule
from longctx_patch.engine.chain.recurrence import Recurrence
from longctx_patch.engine.chain.state_space import StateSpace
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.model.sequence_kernels import (
    KERNELS,
    functions_of,
    plain,
    run_torch_recurrences,
    runs_kernel,
    torch_function,
)
from longctx_patch.hf.model.transformers_api import recurrent_modules
from longctx_patch.sequence.layout import Interval
from longctx_patch.verification.shrink import keep_float64
from tests.harness import run_distributed
from tests.hf.float64 import stock_step, whole_row
from tests.hf.steps import Step, errors
from tests.hf.tiny import SUPPORTED, featured_model, gradients, mean_over_ranks
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

ROUNDING = 1e-6
"""What float32 may add where the other error is less."""
LENGTH, HEADS, DIM = 1021, 4, 64
EDGES = (0, 1, 333, 640, LENGTH)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def delta_rule(inputs: list[Tensor], rule: Callable[..., Any]) -> Recurrence:
    query, key, value, decay, beta = inputs
    decays = -F.softplus(decay.to(torch.promote_types(decay.dtype, torch.float32)))
    options = {"use_qk_l2norm_in_kernel": True}
    return DeltaRule(rule, (query, key, value, decays, beta.sigmoid()), options)


def state_space(inputs: list[Tensor], scan: Callable[..., Any]) -> Recurrence:
    b, c, x, decay, dt = inputs
    a = -decay[0, 0].exp().to(torch.promote_types(decay.dtype, torch.float32))
    options = {"chunk_size": 64, "dt_softplus": True}
    return StateSpace(scan, (x, dt, b, c), a, options)


KINDS: dict[str, tuple[ModuleType, str, Callable[..., Recurrence]]] = {
    "delta rule": (modeling_qwen3_5, "torch_chunk_gated_delta_rule", delta_rule),
    "state space": (modeling_bamba, "mamba2_chunk_scan", state_space),
}


def leaves(dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    wide, narrow = (1, LENGTH, HEADS, DIM), (1, LENGTH, HEADS)
    made = [torch.randn(shape, generator=generator) for shape in (wide, wide, wide, narrow, narrow)]
    return [tensor.bfloat16().to(device, dtype).requires_grad_() for tensor in made]


def in_segments(recurrence: Recurrence) -> Tensor:
    """Each segment knows of those before it their maps alone."""
    outs, state = [], None
    for start, stop in pairwise(EDGES):
        slots = Interval(start, stop)
        out, _ = recurrence.run(slots, state, ends=False)
        if state is None:
            _, state = recurrence.run(slots, None, ends=True)
        else:
            m, u = recurrence.map(slots)
            state = recurrence.apply(m, state) + u
        outs.append(out)
    return torch.cat(outs, dim=1)


def whole(recurrence: Recurrence) -> Tensor:
    return recurrence.run(Interval(0, LENGTH), None, ends=False)[0]


def results(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    grad = torch.randn(out.shape, generator=generator).bfloat16().to(out.device, out.dtype)
    return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, inputs, grad))]


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_as_accurate_as_the_whole(kind: str, dtype: torch.dtype) -> None:
    module, name, make = KINDS[kind]
    kernel = getattr(module, name)
    inputs = leaves(torch.float64, "cpu")
    with pytest.MonkeyPatch.context() as patched:
        in_float64(patched)
        wanted = results(whole(make(inputs, torch_function(kernel))), inputs)
    inputs = leaves(dtype, "cuda")
    found = results(in_segments(make(inputs, kernel)), inputs)
    of_whole = results(whole(make(inputs, kernel)), inputs)
    for number, (one, other, exact) in enumerate(zip(found, of_whole, wanted, strict=True)):
        bound = 2 * relative_error(other, exact) + ROUNDING
        assert relative_error(one, exact) <= bound, (number, relative_error(other, exact))


def in_float64(patched: pytest.MonkeyPatch) -> None:
    """Functions that would round to float32 don't."""
    stock = Tensor.to

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return stock(tensor, *args, **options)

    patched.setattr(Tensor, "to", to)
    patched.setattr(Tensor, "float", Tensor.double)


NUM_MODELS = 3
DOCUMENTS = (1, 2, 517, 64, 1, 436)
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_head_dim": 64,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "mamba_chunk_size": 64,
    "num_experts_per_token": 4,
}
"""Heads of sizes that kernels take, and all experts for each token, since another choice of them
is no error of rounding; a config keeps the names that it knows."""
FAMILIES = [
    name for name in ("qwen3_5_text", "olmo_hybrid", "kimi_linear", "bamba") if name in SUPPORTED
]


def exact_step(model: Any, lengths: tuple[int, ...]) -> Step:
    """In float64, which kernels don't know."""
    exact = copy.deepcopy(model)
    keep_float64(exact)
    run_torch_recurrences(exact)
    return stock_step(exact, lengths)


def compared(found: Step, exact: Step) -> dict[str, float]:
    """Without logits, which shards have of their own tokens only."""
    grads = {name: grad.cpu().double() for name, grad in found.grads.items()}
    return errors(Step(found.loss.cpu().double(), grads), exact)


def check_family(rank: int, world_size: int, family: str, dtype: torch.dtype) -> None:
    slow = not all(kernel for _, kernel in expected_to_run(model_of(family, 0)))
    configs = [replace(config, torch_recurrence=slow) for config in configs_of(world_size)]
    groups = [make_sequence_group(config) for config in configs]  # each takes memory, and stays
    for lengths in ((LENGTH,), DOCUMENTS):
        own: list[dict[str, float]] = []
        found: list[list[dict[str, float]]] = [[] for _ in configs]
        for seed in range(NUM_MODELS):
            model = model_of(family, seed)
            wanted = exact_step(model, lengths)
            model.to("cuda", dtype)
            own.append(compared(stock_step(copy.deepcopy(model), lengths), wanted))
            for config, group, steps in zip(configs, groups, found, strict=True):
                step, ran = sharded_step(copy.deepcopy(model), config, group, lengths)
                assert ran.functions == expected_to_run(model), (config, ran)
                together = set[str]() if len(lengths) == 1 else run_together(model)
                assert ran.together == together, (config, ran)
                steps.append(compared(step, wanted))
        for config, steps in zip(configs, found, strict=True):
            assert_as_accurate(mean_errors(steps), mean_errors(own), (lengths, config))


def model_of(family: str, seed: int) -> Any:
    model = featured_model(family, **WIDE, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def mean_errors(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


def assert_as_accurate(found: dict[str, float], own: dict[str, float], where: object) -> None:
    mean = sum(own.values()) / len(own)
    worse = {n: (e, own[n]) for n, e in found.items() if not e <= 2 * max(own[n], mean)}
    assert not worse, (where, worse)


def configs_of(world_size: int) -> list[LongContextConfig]:
    ways: list[dict[str, Any]] = [
        {"ring_degree": world_size},
        {"ring_degree": world_size, "layout": "contiguous", "checkpoint": "full"},
        {"ulysses_degree": world_size, "checkpoint": "attention"},
    ]
    if world_size > 1:
        ways.append({"ulysses_degree": world_size, "recurrent_exchange": "heads"})
    return [LongContextConfig(**way) for way in ways]


def expected_to_run(model: Any) -> set[tuple[str, bool]]:
    """Each function of the model's layers, and whether a kernel runs in its place: wherever its
    package is installed. Elsewhere torch's functions are asked for."""
    mixers = recurrent_modules(model)
    return {(name, KERNELS[name].is_installed) for mixer in mixers for name in functions_of(mixer)}


def run_together(model: Any) -> set[str]:
    """Kernels to which every rank gives some of `DOCUMENTS` together."""
    kernels = {name for name, is_kernel in expected_to_run(model) if is_kernel}
    return kernels - {"causal_conv1d_fn"}


class Ran(NamedTuple):
    functions: set[tuple[str, bool]]
    together: set[str]
    """Those that got documents, by their edges or by a number for each token."""


@contextmanager
def what_runs(model: Any) -> Iterator[Ran]:
    """What ran in the block: transformers' functions keep it in a cell, which is watched."""
    ran = Ran(set(), set())
    with pytest.MonkeyPatch.context() as patched:
        functions = [functions_of(mixer) for mixer in recurrent_modules(model)]
        for name, function in {item for each in functions for item in each.items()}:
            own: Any = plain(function)
            cell = own.__closure__[own.__code__.co_freevars.index("implementation")]
            watched = watch(ran, (name, runs_kernel(function)), cell.cell_contents)
            patched.setattr(cell, "cell_contents", watched)
        yield ran


def watch(ran: Ran, what: tuple[str, bool], function: Any) -> Any:
    @wraps(function)  # what it takes is looked for
    def run(*args: Any, **options: Any) -> Any:
        ran.functions.add(what)
        if any(options.get(name) is not None for name in ("cu_seqlens", "seq_idx")):
            ran.together.add(what[0])
        return function(*args, **options)

    return run


def sharded_step(
    model: Any, config: LongContextConfig, group: SequenceGroup, lengths: tuple[int, ...]
) -> tuple[Step, Ran]:
    handle = patch(model, config, group=group)
    with what_runs(model) as ran:  # only now: `patch` would take a watched function for a kernel
        loss = model(**whole_row(lengths, "cuda")).loss
        loss.backward()
    handle.unpatch()
    grads = {name: mean_over_ranks(grad.double()) for name, grad in gradients(model).items()}
    return Step(mean_over_ranks(loss.detach()), grads), ran


@DTYPES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_models_are_as_accurate_as_stock_ones(
    num_ranks: int, family: str, dtype: torch.dtype
) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    given = (num_ranks, family, dtype)
    run_distributed(check_family, num_ranks, *given, backend="nccl", timeout_s=280)
