"""docs/published.md: its table is what the cost model says now, and ratios have their limits."""

from dataclasses import replace
from math import inf

import pytest

from docs import published
from docs.published import (
    BACKWARD,
    BEGIN,
    COMPARISONS,
    END,
    FORWARD,
    PAGE,
    Comparison,
    Setup,
    causal_seconds,
    faster,
    load,
    of_ideal,
    saved_recompute_over,
    table,
    waiting,
    with_table,
)
from longctx_patch.plans.traffic import AttentionShape
from longctx_patch.plans.types import Block, Operand
from longctx_patch.predict.hardware import KernelRate

UNPUBLISHED = {"D4": 15 / 8, "B3": 2.0}
"""Limits where the sources have no number: by FLOPs, and 4 * 3 of 6 shards of bytes."""


def test_the_table_is_what_the_model_says_now() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, table()) == page, "run `make pictures` and read the page's text again"


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.key)
def test_simulated_ratios_are_on_the_published_side_of_1(comparison: Comparison) -> None:
    expected = comparison.published or UNPUBLISHED[comparison.key]
    assert (comparison.ratio(comparison.setup) > 1) == (expected > 1)


def test_keys_are_distinct_and_have_a_section() -> None:
    page = PAGE.read_text(encoding="utf-8")
    keys = [comparison.key for comparison in COMPARISONS]
    assert len(set(keys)) == len(keys)
    for letter in {key[0] for key in keys}:
        assert f"\n## {letter}: " in page


def compute_bound(ranks: int) -> Setup:
    """Nothing takes time but FLOPs, at one rate."""
    rate = KernelRate(1e12, 0, 0)
    hardware = replace(
        published.A100.with_free_links(),
        forward_full=rate,
        forward_causal=rate,
        backward_full=rate,
        backward_causal=rate,
        copy_bandwidth=inf,
        add_bandwidth=inf,
        merge_bandwidth=inf,
        host_forward_s=0,
        host_backward_s=0,
        host_exchange_s=0,
        host_message_s=0,
    )
    workload = load(4096 * ranks, 8, 8)
    return Setup(machine="ideal GPUs", hardware=hardware, ranks=ranks, workload=workload)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_balanced_plans_over_the_ring_have_the_closed_form(ranks: int) -> None:
    """The ring takes P - 1/2 blocks, a balanced plan P / 2, DISTFLASHATTN for even P half more."""
    ring, balanced = ranks - 0.5, ranks / 2
    blocks = {
        "distflash_balanced": balanced,
        "zigzag": balanced,
        "striped": balanced,
        "distflash": balanced + 0.5,
    }
    for plan, expected in blocks.items():
        assert faster(plan, than="ring")(compute_bound(ranks)) == pytest.approx(
            ring / expected, rel=1e-3
        ), plan
    assert of_ideal("zigzag")(compute_bound(ranks)) == pytest.approx(1, rel=1e-3)
    assert of_ideal("ring")(compute_bound(ranks)) == pytest.approx(balanced / ring, rel=1e-3)


def test_kernels_take_the_times_that_the_sources_give() -> None:
    one_gpu = published.D_NODE.at(64 * published.K).only(FORWARD)
    assert one_gpu.one_gpu_seconds() == pytest.approx(0.23387)
    for setup, forward, both in (
        (published.Z_H800, 591.5, 154.7),
        (published.Z_A100, 373.4, 94.7),
    ):
        own = setup.at(8 * published.K)
        assert 1 / own.only(FORWARD).one_gpu_seconds() == pytest.approx(forward)
        assert 1 / own.one_gpu_seconds() == pytest.approx(both)
        assert setup.ideal_seconds() == pytest.approx(8 / both)


def test_backward_without_a_time_changes_as_forward_does() -> None:
    workload = load(64 * published.K, 32, 32)
    factors = [
        causal_seconds(published.D_A100, direction, workload)
        / causal_seconds(published.A100, direction, workload)
        for direction in (FORWARD, BACKWARD)
    ]
    assert factors[0] == pytest.approx(factors[1])
    assert factors[0] > 1


def test_one_forward_takes_the_time_that_keeping_its_output_saves() -> None:
    """Li et al., table 5 at 32K tokens for each GPU: 76.38 s and 58.46 s for 32 layers."""
    saved_s = (76.38 - 58.46) / 32
    assert published.D_NODE.only(FORWARD).seconds("distflash") == pytest.approx(saved_s, rel=0.05)


def test_flops_bound_the_gain_over_ulysses() -> None:
    """4.5 / 3.5 by recompute, 16/17 by an idle step; three of 33 heads against 33/16 of them."""
    gain = saved_recompute_over("distflash", "ulysses")
    bound = 4.5 / 3.5 * 16 / 17
    assert gain(compute_bound(16).with_heads(32, 32)) == pytest.approx(bound, rel=1e-3)
    assert gain(compute_bound(16).with_heads(33, 33)) == pytest.approx(bound * 48 / 33, rel=1e-3)


def test_distflash_waits_less_in_both_directions_together() -> None:
    for num_tokens, expected in ((128, 1.28), (256, 1.07), (512, 1.03)):
        setup = published.D_NODES.at(num_tokens * published.K)
        assert waiting("distflash")(setup) == pytest.approx(expected, abs=0.005)


def test_h800_with_bytes_at_the_price_of_the_h100() -> None:
    setup = published.Z_H800
    link = setup.hardware.intra_node.bandwidth / published.H100.intra_node.bandwidth
    price = replace(setup.hardware, overlap_slowdown=setup.hardware.overlap_slowdown * link)
    for plan, expected in (("ring", 0.532), ("striped", 0.861), ("zigzag", 0.910)):
        share = of_ideal(plan)(replace(setup, hardware=price))
        assert share == pytest.approx(expected, abs=0.0005), plan


def tflops(setup: Setup, plan: str) -> float:
    """Of each GPU, forward and backward of a causal mask, counted as BurstEngine does."""
    load = setup.workload
    flops = 3.5 * 2 * load.num_tokens**2 * load.num_heads * load.head_dim
    return flops / setup.ranks / setup.seconds(plan) / 1e12


SPEEDS = {  # double ring, flat ring, double ring without slowdown
    128: ((79, 39, 111), (92, 53, 125)),
    256: ((112, 78, 143), (123, 104, 153)),
}


@pytest.mark.parametrize("sums_in_bfloat16", [False, True])
def test_speeds_of_the_rings(sums_in_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = AttentionShape.block_bytes

    def with_half_sums(shape: AttentionShape, block: Block) -> int:
        return block_bytes(shape, block) // (2 if block.operand is Operand.DKV_SUM else 1)

    if sums_in_bfloat16:
        monkeypatch.setattr(AttentionShape, "block_bytes", with_half_sums)
    for num_tokens, expected in SPEEDS.items():
        setup = published.L_NODES.at(num_tokens * published.K)
        speeds = (
            tflops(setup, "double_ring"),
            tflops(setup, "zigzag"),
            tflops(setup.without_slowdown(), "double_ring"),
        )
        assert speeds == pytest.approx(expected[sums_in_bfloat16], abs=0.5)


def test_only_the_table_is_written() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_table(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for broken in (page.replace(BEGIN, ""), page.replace(END, "")):
        with pytest.raises(ValueError, match="has not both marks"):
            with_table(broken, "new")
