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
    table,
    with_table,
)
from longctx_patch.plans.hardware import KernelRate

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


def test_only_the_table_is_written() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_table(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for broken in (page.replace(BEGIN, ""), page.replace(END, "")):
        with pytest.raises(ValueError, match="has not both marks"):
            with_table(broken, "new")
