"""NCCL: the operator and whole models in bfloat16, judged against float64.

Distribution must not cost accuracy: every error is at most twice that of the plain kernel, or the
plain model, on one GPU.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch import LongContextConfig, make_sequence_group, patch
from longctx_patch.engine.autograd import distributed_attention
from longctx_patch.engine.call import AttentionCall, CallShape
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.plans.generators.table import PLANS
from tests.engine.exact import Case, causal_call, causal_row, config_of, inputs, one_rank
from tests.harness import run_distributed
from tests.hf.steps import collated
from tests.hf.tiny import FAMILIES, gradients, tiny_model, token_rows
from tests.masked import Masked, dense_masked, masks_of
from tests.reference import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more"),
]

HEADS = [(8, 8), (8, 2), (8, 1)]
HEAD_DIM, DEVICE = 64, "cuda"


def degrees_of(world_size: int) -> list[tuple[int, int]]:
    return [(u, world_size // u) for u in range(1, world_size + 1) if world_size % u == 0]


def configs_of(world_size: int) -> list[LongContextConfig]:
    """Every pair of degrees in every layout, and every plan over a ring of all ranks."""
    products = product(degrees_of(world_size), ("zigzag", "contiguous"))
    return [
        *(config_of("auto", layout, *degrees) for degrees, layout in products),
        *(config_of(plan, None, 1, world_size) for plan in PLANS),
    ]


def on_gpu(config: LongContextConfig, masked: Masked, **fields: Any) -> Case:
    """A call in bfloat16."""
    kind: dict[str, Any] = {"heads": (8, 2), "head_dim": HEAD_DIM, "device": DEVICE} | fields
    return Case(config, masked, dtype=torch.bfloat16, **kind)


def whole_results(group: SequenceGroup, case: Case) -> dict[str, Tensor]:
    """Gather out and gradients of all ranks; check that each sent what its plans say."""
    group.counters.reset()
    found = one_rank(group, case)
    assert found.sent == found.planned, group.config
    tensors = {name: x for name, x in found.tensors.items() if name != "lse"}
    layout = group.layout(case.masked.documents)
    for name, shard in tensors.items() if group.num_ranks > 1 else ():
        if name == "dsinks":
            dist.all_reduce(shard)
        else:
            tensors[name] = layout.unshard(gather(shard, layout.sizes), 1)
    return tensors


def gather(shard: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Shards of all ranks; NCCL gathers equal sizes, so shards are padded for the transfer."""
    padded = torch.zeros(len(shard), max(sizes), *shard.shape[2:], dtype=shard.dtype, device=DEVICE)
    padded[:, : shard.shape[1]] = shard
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [part[:, :size] for part, size in zip(everyone, sizes, strict=True)]


def check_operator(rank: int, world_size: int) -> None:
    """The operator is as accurate as the plain kernel."""
    alone = make_sequence_group(LongContextConfig())
    for config in configs_of(world_size):
        group = make_sequence_group(config)
        for kernel, heads in product(("cudnn", "torch_flash"), HEADS):
            assert_as_accurate(group, alone, on_gpu(config, causal_row(1021), heads=heads), kernel)
        group.close()


def assert_as_accurate(group: SequenceGroup, alone: SequenceGroup, case: Case, kernel: str) -> None:
    """Each error is at most twice that of the same kernel over the whole sequence on one GPU."""
    q, k, v, dout, all_sinks = inputs(case)
    sinks = all_sinks if case.sinks else None
    wanted = dense_masked(q, k, v, dout, case.masked.table, sinks, case.softcap)
    plain, found = (whole_results(with_kernel(g, kernel), case) for g in (alone, group))
    for name, part in found.items():
        bound = 2 * relative_error(plain[name], wanted[name])
        error = relative_error(part, wanted[name])
        assert error <= bound, (name, case.masked.name, kernel, group.config, error, bound)


MASKED_LENGTH, MANY_HEADS = 1000, (64, 16)
"""A sink's gradient is one number per head: the error of a few can be small by luck."""


def check_masks(rank: int, world_size: int) -> None:
    """Every kind of mask is as accurate as on one GPU."""
    alone = make_sequence_group(LongContextConfig())
    plans = ("halo", "ring", "zigzag_direct", "distflash_balanced", "allgather", "burst")
    configs = [
        LongContextConfig(ring_degree=world_size),
        LongContextConfig(ulysses_degree=world_size),
        LongContextConfig(ulysses_degree=2, ring_degree=world_size // 2),
        *(LongContextConfig(ring_degree=world_size, plan=plan) for plan in plans),
    ]
    for config in configs:
        group = make_sequence_group(config)
        for masked in masks_of(MASKED_LENGTH):
            # cuDNN builds a graph for every new shape, which is slow.
            kernels = ("torch_flash", "cudnn") if config is configs[0] else ("torch_flash",)
            for kernel in kernels:
                if masked.mask is None or not masked.mask.has_tiles:
                    case = on_gpu(config, masked, batch=1, sinks=True, heads=MANY_HEADS)
                    assert_as_accurate(group, alone, case, kernel)
        group.close()


def check_flex(rank: int, world_size: int) -> None:
    """FlexAttention under one config only: each kind of piece takes many seconds to compile."""
    alone = make_sequence_group(LongContextConfig())
    group = make_sequence_group(LongContextConfig(ring_degree=world_size, layout="contiguous"))
    for masked in masks_of(MASKED_LENGTH):
        if masked.name in ("documents", "function"):
            case = on_gpu(group.config, masked, batch=1, sinks=True, heads=MANY_HEADS, softcap=2.0)
            assert_as_accurate(group, alone, case, "flex")
    group.close()


def with_kernel(group: SequenceGroup, kernel: str) -> SequenceGroup:
    """The group with another kernel; a new group for each kernel would use up NCCL's handles."""
    return replace(group, config=replace(group.config, kernel=kernel))


def check_the_host_runs_ahead(rank: int, world_size: int) -> None:
    """Forward and backward of every plan return before the device has done them."""
    for plan in PLANS:
        config = config_of(plan, None, 1, world_size)
        group = make_sequence_group(config)
        shape = (1, 512, 8, HEAD_DIM)
        q, k, v, dout = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16).unbind(0)
        for x in (q, k, v):
            x.requires_grad_()
        call = causal_call(group, 512 * world_size, HEAD_DIM**-0.5, CallShape.of(q, k, v))

        def forward_and_backward(
            call: AttentionCall = call,
            inputs: tuple[Tensor, Tensor, Tensor] = (q, k, v),
            dout: Tensor = dout,
        ) -> None:
            out, _ = distributed_attention(*inputs, None, call)
            torch.autograd.grad(out, inputs, dout)

        forward_and_backward()  # sets up communicators, kernels and memory
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(4_000_000_000)  # clock cycles: about two seconds
        forward_and_backward()
        done.record()
        assert not done.query(), f"{config.plan}: the host waited for the device"
        torch.cuda.synchronize()
        group.close()


def model_outcome(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients(model)


def gradient_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, float]:
    """Relative error of all gradients as one vector, and of the worst parameter's."""
    whole = [
        torch.cat([grads[name].double().flatten() for name in wanted]) for grads in (found, wanted)
    ]
    worst = max(relative_error(found[name], grad) for name, grad in wanted.items())
    return relative_error(*whole), worst


LATENT_SIZES: dict[str, Any] = {
    "head_dim": 32,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
"""Sizes of latent attention, whose latents travel in rings and heads under Ulysses."""


def check_models(rank: int, world_size: int) -> None:
    """Models over several GPUs are as accurate as on one."""
    all_sizes: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
    rows = token_rows(509)
    ids = torch.tensor([row["input_ids"] for row in rows], device="cuda")
    plain_batch = {"input_ids": ids, "labels": ids}
    for family in (*FAMILIES, "youtu"):
        sizes = all_sizes | (LATENT_SIZES if family == "youtu" else {})
        # One set of bfloat16 weights; the reference holds the same numbers in float64.
        weights = tiny_model(family, dtype=torch.bfloat16, **sizes).state_dict()

        def model(
            dtype: torch.dtype, family: str = family, sizes: Any = sizes, weights: Any = weights
        ) -> Any:
            made = tiny_model(family, dtype=dtype, **sizes)
            made.load_state_dict(weights)
            return made.cuda()

        loss, wanted = model_outcome(model(torch.float64), plain_batch)
        plain_loss, plain = model_outcome(model(torch.bfloat16), plain_batch)
        for ulysses, ring in degrees_of(world_size):
            config = LongContextConfig(
                ulysses_degree=ulysses, ring_degree=ring, checkpoint="attention"
            )
            sharded = model(torch.bfloat16)
            handle = patch(sharded, config)
            batch = {key: value.cuda() for key, value in collated(handle, rows).items()}
            found_loss, found = model_outcome(sharded, batch)
            found = {name: grad.float() for name, grad in found.items()}
            dist.all_reduce(found_loss)
            # One number may be right by luck on one GPU, so the bound is never below 1e-3.
            assert relative_error(found_loss / world_size, loss) <= max(
                2 * relative_error(plain_loss, loss), 1e-3
            )
            for grad in found.values():
                dist.all_reduce(grad)
                grad /= world_size
            bounds, errors = (gradient_errors(grads, wanted) for grads in (plain, found))
            assert errors[0] <= 2 * bounds[0], (family, config)
            assert errors[1] <= 2 * bounds[1], (family, config)


def check_bits(rank: int, world_size: int) -> None:
    """Deterministic runs are bitwise equal."""
    for ulysses, ring in degrees_of(world_size):
        config = LongContextConfig(ulysses_degree=ulysses, ring_degree=ring, deterministic=True)
        group = make_sequence_group(config)
        case = on_gpu(config, causal_row(4093))
        first, *others = (whole_results(group, case) for _ in range(4))
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first), config
        group.close()


@pytest.mark.parametrize(
    "checked",
    [
        *(check_operator, check_masks, check_flex),
        *(check_the_host_runs_ahead, check_models, check_bits),
    ],
)
def test_over_all_gpus(checked: Callable[[int, int], None]) -> None:
    world_size = 4 if torch.cuda.device_count() >= 4 else 2
    run_distributed(checked, world_size, world_size, backend="nccl", timeout_s=280)
