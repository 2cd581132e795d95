"""What ranks take to expand latents: counted where each rank does it, by the rows it expands."""

from dataclasses import replace

import pytest
import torch

from longctx_patch.engine.call import CallShape
from longctx_patch.families.facts import ModelFacts
from longctx_patch.planner.attention_cost import Workload, predict
from longctx_patch.planner.machines import MACHINES
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from tests.hf.tiny import featured_model

H100 = MACHINES["h100"]
PLAIN = Workload(
    num_tokens=65536, num_heads=128, num_kv_heads=128, head_dim=192, latent_dim=576, batch=2
)
EXPANDED = replace(PLAIN, expansion=512 * 128 * 256)
ROW_S = 2 * 2 * 512 * 128 * 256 / H100.matmul_flops
"""Seconds of one product for a token of both rows."""


def extra(setting: Setting, direction: Direction) -> tuple[float, float]:
    """(seconds of kernels, of the makespan) that are more where expansions count."""
    without, counted = (predict(setting, direction, w, H100) for w in (PLAIN, EXPANDED))
    assert counted.bytes_sent_per_rank == without.bytes_sent_per_rank
    return counted.kernel_s - without.kernel_s, counted.makespan_s - without.makespan_s


@pytest.mark.parametrize(
    ("direction", "products"), [(Direction.FORWARD, 1), (Direction.BACKWARD, 3)]
)
def test_a_ring_expands_what_it_computes_with(direction: Direction, products: int) -> None:
    """The first of two ranks has the outer quarters of the row: its last one sees all keys of the
    other rank, whose quarters see the first quarter alone. Both see their own."""
    ring = Setting(plan="zigzag", layout="zigzag", ring_degree=2, ulysses_degree=1)
    quarter = 65536 // 4
    kernel_s, makespan_s = extra(ring, direction)
    assert kernel_s == pytest.approx(products * ROW_S * (4 + 3) * quarter / 2)
    assert products * ROW_S * 3 * quarter <= makespan_s <= products * ROW_S * 4 * quarter


@pytest.mark.parametrize(
    ("direction", "products"), [(Direction.FORWARD, 1), (Direction.BACKWARD, 2)]
)
def test_ulysses_expands_own_tokens_once(direction: Direction, products: int) -> None:
    ulysses = Setting(plan="zigzag", layout="zigzag", ring_degree=1, ulysses_degree=4)
    expected = products * ROW_S * 65536 / 4
    assert extra(ulysses, direction) == pytest.approx((expected, expected), rel=1e-3)


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_the_weights_are_those_of_the_model(family: str) -> None:
    """By its config, and by the tensors of a call."""
    model = featured_model(family)
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    facts = ModelFacts.of(model.config)
    assert facts.expansion == weight.numel()
    config = model.config
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    q = torch.empty(1, 3, heads, key_dim)
    latent, rotary = torch.empty(1, 3, 1, rank), torch.empty(1, 3, 1, config.qk_rope_head_dim)
    shape = CallShape.of(q, latent, rotary).with_latents(latent, rotary, config.v_head_dim)
    assert shape.expansion == weight.numel()
    assert shape.latent_dim == facts.latent_dim
