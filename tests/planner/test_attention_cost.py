"""Predictions of whole attention calls."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.benchmarks  # puts the scripts' folder on the path  # noqa: F401  # isort: skip
from problems import lognormal_lengths

from longctx_patch import attention, virtual_group
from longctx_patch.config import LongContextConfig
from longctx_patch.planner.attention_cost import Workload, predict
from longctx_patch.planner.machines import MACHINES
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS
from longctx_patch.sequence.layout import LayoutName
from longctx_patch.transport import VirtualTransport, run_virtual_ranks
from tests.planner.cudnn import with_kernel

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
H200 = MACHINES["h200"]
WITH_CUDNN = with_kernel(H200, "cudnn")
WORKLOAD = Workload(num_tokens=131072)

# Medians of each plan alone with cuDNN on 4 H200 of one host (torch 2.11, CUDA 13.0), in ms:
# forward and backward at 32,768, 65,536 and 131,072 tokens.
MEASURED_MS = {
    "zigzag": ((4.429, 12.350), (16.938, 45.571), (63.585, 179.612)),
    "zigzag_direct": ((4.377, 12.148), (18.053, 45.670), (63.026, 178.711)),
    "ring": ((6.808, 20.055), (28.105, 78.079), (107.949, 296.133)),
    "striped": ((4.705, 13.142), (17.445, 48.547), (63.827, 181.971)),
    "distflash": ((5.376, 14.538), (20.839, 58.781), (78.886, 218.409)),
    "distflash_balanced": ((4.841, 12.177), (17.049, 47.100), (64.237, 176.665)),
    "allgather": ((5.079, 13.511), (16.939, 46.699), (63.344, 177.521)),
    "ulysses": ((4.179, 11.100), (16.361, 43.424), (68.249, 174.200)),
}


# Medians of forward and backward together by benchmarks/attention.py on the same GPUs, in ms, with
# flash-attn 4 at 131,072 tokens. Packed rows have log-normal documents.
MASKED_MS = {
    ("halo", "balanced", 64): 7.52,
    ("ulysses", "balanced", 64): 11.14,
    ("halo", "balanced", 300): 3.76,
    ("halo", "contiguous", None): 14.98,
    ("halo", "zigzag", None): 15.64,
    ("ulysses", "zigzag", None): 19.16,
}


def masked(num_documents: int | None) -> Workload:
    """The measured packed row of so many documents; None: the measured window."""
    if num_documents is None:
        return replace(WORKLOAD, window=4096)
    return replace(WORKLOAD, lengths=lognormal_lengths(WORKLOAD.num_tokens, num_documents))


def setting(plan: str, ranks: int = 4, ulysses: int = 1) -> Setting:
    return Setting(
        plan=plan,
        layout=PLANS[plan].layouts[0],
        ulysses_degree=ulysses,
        ring_degree=ranks // ulysses,
    )


@pytest.mark.parametrize("plan", MEASURED_MS)
def test_predictions_are_within_15_percent_of_what_was_measured(plan: str) -> None:
    asked = setting("zigzag", ulysses=4) if plan == "ulysses" else setting(plan)
    for num_tokens, both in zip((32768, 65536, 131072), MEASURED_MS[plan], strict=True):
        for direction, measured_ms in zip(Direction, both, strict=True):
            workload = replace(WORKLOAD, num_tokens=num_tokens)
            found_ms = predict(asked, direction, workload, WITH_CUDNN).makespan_s * 1e3
            assert found_ms == pytest.approx(measured_ms, rel=0.15), (num_tokens, direction)


@pytest.mark.parametrize(("plan", "layout", "num_documents"), MASKED_MS)
def test_predictions_of_packed_rows_and_windows(
    plan: str, layout: LayoutName, num_documents: int | None
) -> None:
    asked = replace(setting("halo"), layout=layout)
    if plan == "ulysses":
        asked = replace(asked, ulysses_degree=4, ring_degree=1)
    found = [predict(asked, way, masked(num_documents), H200).makespan_s for way in Direction]
    measured_ms = MASKED_MS[plan, layout, num_documents]
    near = 0.13 if plan == "ulysses" and num_documents else 0.03
    assert sum(found) * 1e3 == pytest.approx(measured_ms, rel=near)


def test_a_window_as_wide_as_the_row_is_causal() -> None:
    assert replace(WORKLOAD, window=131072).is_causal
    assert not replace(WORKLOAD, window=131071).is_causal
    assert replace(WORKLOAD, lengths=(131072,)).is_causal
    assert not replace(WORKLOAD, lengths=(65536, 65536)).is_causal
    times = {
        predict(setting("zigzag"), FORWARD, workload, H200)
        for workload in (WORKLOAD, replace(WORKLOAD, window=131072, lengths=(131072,)))
    }
    assert len(times) == 1


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), [(8, 2, 2), (8, 2, 4), (24, 8, 5)])
def test_buffers_of_ulysses_are_those_of_the_widest_exchange(
    heads: int, kv_heads: int, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction is what the busiest rank sends or receives in one exchange."""
    tokens, dim = 8 * degree, 4
    config = LongContextConfig(ulysses_degree=degree)
    exchanged: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(degree)}
    all_to_all = VirtualTransport.all_to_all

    def noted(self: VirtualTransport, send: Tensor, *rest: Any) -> Any:
        exchanged[self.group_rank].append((send.nbytes, rest[1].nbytes))
        return all_to_all(self, send, *rest)

    def forward(ranks: VirtualTransport) -> None:
        q, k, v = (torch.zeros(1, 8, n, dim) for n in (heads, kv_heads, kv_heads))
        attention(q, k, v, group=virtual_group(ranks, config), check_ranks=False)

    monkeypatch.setattr(VirtualTransport, "all_to_all", noted)
    run_virtual_ranks(degree, forward)
    widest = max(size for of_rank in exchanged.values() for size in of_rank[0])  # of q, k and v
    workload = Workload(
        num_tokens=tokens, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, itemsize_bytes=4
    )
    asked = setting("zigzag", ranks=degree, ulysses=degree)
    assert predict(asked, FORWARD, workload, H200).peak_buffer_bytes == widest


def test_ulysses_sends_heads_for_tokens() -> None:
    """A rank sends (2 A + 2 B) (P - 1) / P in forward (DeepSpeed-Ulysses), in bfloat16."""
    found = predict(setting("zigzag", ranks=8, ulysses=8), FORWARD, WORKLOAD, H200)
    one_head = WORKLOAD.num_tokens // 8 * WORKLOAD.head_dim * 2
    assert found.plan == "ulysses"
    assert set(found.bytes_sent_per_rank) == {(2 * 32 + 2 * 8) * one_head * 7 // 8}
    assert set(found.messages_per_rank) == {2 * 7}
    assert found.idle_fraction == 0
    assert len(found.bytes_sent_per_rank) == 8


@pytest.mark.parametrize("huge", [{"num_tokens": 10**12 * 2}, {"batch": 10**20}], ids=str)
def test_sizes_beyond_64_bit_sums_are_refused(huge: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"up to 2\*\*40 tokens and 2\*\*60 bytes. Use smaller"):
        replace(WORKLOAD, **huge)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_tokens": 0},
        {"num_kv_heads": 3},
        {"batch": -1},
        {"head_dim": 0},
        {"window": 0},
        {"lengths": (0, 5)},
        {"lengths": (131072, 1)},
        {"lengths": (131073,)},
        {"lengths": (-5,)},
    ],
    ids=str,
)
def test_a_workload_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        replace(WORKLOAD, **bad)


def test_what_the_cpu_bounds_waits_for_no_message() -> None:
    ulysses, workload = setting("zigzag", ranks=8, ulysses=8), Workload(num_tokens=4096)
    found = predict(ulysses, FORWARD, workload, MACHINES["h100"])
    assert found.makespan_s >= MACHINES["h100"].host_ulysses_s
    assert found.exposed_communication_s == 0


def test_wide_heads_have_the_rates_of_the_kernel_that_takes_them() -> None:
    """On Hopper heads of 256 numbers are cuDNN's, whose backward was measured slower."""
    row = Workload(num_tokens=131072, num_heads=16, num_kv_heads=4, head_dim=128)
    wide = replace(row, num_heads=8, head_dim=256, num_kv_heads=2)
    here = MACHINES["h200"]
    assert (here.kernels.of(192).kernel, here.kernels.of(256).kernel) == ("flash_attn_4", "cudnn")
    setting = Setting(plan="zigzag", layout="zigzag", ulysses_degree=1, ring_degree=1)
    for machine, ratio in ((here, 583 / 378), (with_kernel(here, "cudnn"), 540 / 378)):
        seconds = [
            predict(setting, Direction.BACKWARD, kind, machine).makespan_s for kind in (row, wide)
        ]
        assert seconds[1] / seconds[0] == pytest.approx(ratio, rel=0.01)
    assert MACHINES["a100"].kernels.of(256) is MACHINES["a100"].kernels


def test_uneven_heads_idle() -> None:
    """10 heads over 4 ranks: two have 3 and two have 2, so a sixth of the time is idle."""
    workload = Workload(num_tokens=8192, num_heads=10, num_kv_heads=10)
    found = predict(setting("zigzag", ulysses=4), FORWARD, workload, H200)
    assert found.idle_fraction == pytest.approx(1 - 10 / 12)


def test_the_timeline_covers_every_rank_of_a_product() -> None:
    found = predict(
        setting("zigzag", ranks=8, ulysses=2), FORWARD, WORKLOAD, H200, with_timeline=True
    )
    assert {span.rank for span in found.timeline} == set(range(8))
    assert max(span.stop_s for span in found.timeline) <= found.makespan_s * (1 + 1e-9)
    assert {"ALL_TO_ALL", "KV", "Q0 x KV0"} <= {span.label for span in found.timeline}
