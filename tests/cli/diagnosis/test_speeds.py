"""GPUs and links that are slow are named, by rates that are given: nothing is timed here."""

from dataclasses import replace
from math import isnan, nan

import pytest

from longctx_patch.cli.diagnosis.gpus import Gpu, Gpus
from longctx_patch.cli.diagnosis.speeds import Speeds, check_gpu_speed, check_link_speed

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), int(79.2 * GIB), 79 * GIB, "9c2d", "0000:3b:00.0")
PAIRS = [(i, j) for i in range(4) for j in range(4) if i != j]
FOUR = Gpus(seen=(H100,) * 4, links=dict.fromkeys(PAIRS, "NV18"))
EQUAL = Speeds([700e12, 725e12, 690e12, 695e12], [2.95e12] * 4, dict.fromkeys(PAIRS, 365e9))


def test_equal_gpus_and_links_are_ok() -> None:
    check = check_gpu_speed(FOUR, EQUAL)
    assert check.state == "ok"
    assert check.found == "matrix products 690 to 725 TFLOP/s; copies 2,950 GB/s"
    assert check.figures["gpu_1_matrix_products_tflop_per_s"] == 725
    assert check.figures["gpu_3_copies_gb_per_s"] == 2950
    links = check_link_speed(FOUR, EQUAL)
    assert (links.state, links.found) == ("ok", "12 ways NV18: 365 GB/s")
    assert links.figures["gpu_2_to_0_gb_per_s"] == 365
    assert check_gpu_speed(Gpus(), Speeds([], [])).state == "skipped"
    assert check_link_speed(Gpus(), Speeds([], [])).state == "skipped"


@pytest.mark.parametrize(("rate", "state"), [(137e12, "failed"), (600e12, "warning")])
def test_a_gpu_that_computes_slowly_is_named(rate: float, state: str) -> None:
    check = check_gpu_speed(FOUR, replace(EQUAL, products=[700e12, 700e12, rate, 700e12]))
    assert check.state == state
    assert (
        f"GPU 2 (NVIDIA H100 80GB HBM3, 9c2d, 0000:3b:00.0): matrix products {rate / 1e12:.0f} "
        f"TFLOP/s, {rate / 700e12:.0%} of 700, the others' median" in check.found
    )
    assert check.fix.startswith("nvidia-smi -q -i 0000:3b:00.0 -d PERFORMANCE")
    copies = check_gpu_speed(FOUR, replace(EQUAL, copies=[3e12, 3e12, 3e12, 2e12]))
    assert "copies 2,000 GB/s, 67% of 3,000" in copies.found


def test_gpus_are_compared_with_their_kind() -> None:
    """A host that is slow as a whole is found by what its kind is known to do; another kind of GPU
    is not slow because its neighbour is fast."""
    slow = check_gpu_speed(FOUR, replace(EQUAL, products=[400e12] * 4))
    assert slow.state == "failed"
    assert "58% of 685, what an NVIDIA H100 80GB HBM3 is known to do" in slow.found
    other = replace(H100, name="NVIDIA RTX 6000 Ada", total_bytes=48 * GIB)
    mixed = Gpus(seen=(H100, other, other))
    speeds = Speeds([700e12, 250e12, 255e12], [3e12, 0.8e12, 0.8e12])
    assert check_gpu_speed(mixed, speeds).state == "ok"
    assert check_gpu_speed(mixed, replace(speeds, products=[700e12, 200e12, 255e12])).state == (
        "warning"
    )


def test_a_gpu_without_free_memory_is_said() -> None:
    full = replace(EQUAL, products=[700e12, nan, 700e12, 700e12], copies=[3e12, nan, 3e12, 3e12])
    check = check_gpu_speed(FOUR, full)
    assert check.state == "warning"
    assert check.found.endswith("GPU 1 has no memory free to be measured")
    assert not any(isnan(figure) for figure in check.figures.values())


def test_slow_links_are_named() -> None:
    one = check_link_speed(FOUR, replace(EQUAL, links={**EQUAL.links, (1, 3): 52e9}))
    assert one.state == "failed"
    assert "GPU 1 to GPU 3: 52 GB/s, 14% of 365, the others' median" in one.found
    all_slow = check_link_speed(FOUR, replace(EQUAL, links=dict.fromkeys(PAIRS, 52e9)))
    assert "22% of 240, what NVLink of such GPUs is known to do; and 6 more" in all_slow.found
    # Of other kinds of links nothing is known, and they are compared with their own kind.
    kinds = {pair: "PIX" if pair in ((0, 1), (1, 0)) else "SYS" for pair in PAIRS}
    rates = {pair: 50e9 if kind == "PIX" else 20e9 for pair, kind in kinds.items()}
    assert check_link_speed(replace(FOUR, links=kinds), replace(EQUAL, links=rates)).state == "ok"
