"""Clusters are parsed from text such as 4xH200."""

from dataclasses import replace

import pytest

from longctx_patch.planner.job import gpus_together, parse_cluster
from longctx_patch.planner.machines import GIB, MACHINES
from longctx_patch.plans import Direction
from tests.planner.jobs import llama_job, result_of


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("4xH200", 4, "h200"),
        ("H200", 1, "h200"),
        (" 4 x h200 ", 4, "h200"),
        ("8*H100", 8, "h100"),
        ("3XA100", 3, "a100"),
        ("2xa100-40", 2, "a100-40"),
        ("64xH100", 64, "h100"),
        ("2xRTX6000-Ada", 2, "rtx6000-ada"),
    ],
)
def test_a_number_and_a_kind(text: str, count: int, name: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.num_gpus, cluster.hardware) == (count, MACHINES[name])
    assert cluster.gpus_per_node == min(count, 8)
    assert str(cluster) == f"{count}x{name.upper()}"


@pytest.mark.parametrize(
    ("name", "peak", "bandwidth", "gib"),
    [
        ("l40s", 362, 864, 48),
        ("a6000", 154.8, 768, 48),
        ("rtx6000-ada", 364, 960, 48),
        ("rtx5090", 209.5, 1792, 32),  # float32 sums at half the rate, as on the 4090
        ("rtx4090", 165.2, 1008, 24),
    ],
)
def test_cards_have_the_numbers_of_their_data_sheets(
    name: str, peak: float, bandwidth: float, gib: int
) -> None:
    """And the A100's share of them, which is said where they are used."""
    card, a100 = MACHINES[name], MACHINES["a100"]
    assert card.peak_flops == peak * 1e12
    assert 0.91 < card.memory_bytes / GIB / gib < 0.99
    assert card.copy_bandwidth / bandwidth == pytest.approx(a100.copy_bandwidth / 2039)
    share = card.peak_flops / a100.peak_flops
    assert card.matmul_flops == pytest.approx(share * a100.matmul_flops)
    for direction in Direction:
        ours = card.kernels.rate(direction, causal=True).peak_flops
        assert ours == pytest.approx(share * a100.kernels.rate(direction, causal=True).peak_flops)
    assert card.intra_node.bandwidth < a100.intra_node.bandwidth / 5  # no NVLink
    assert (card.note, a100.note) == ("rates by data sheet, not measured", "")
    assert card.recurrent.source("delta rule") == "estimated"


@pytest.mark.parametrize(
    "text", ["", "4", "x", "4xB300", "-1xH200", "4xH200x2", "1.5xH200", "H200 4"]
)
def test_another_text_is_refused_with_the_kinds(text: str) -> None:
    with pytest.raises(ValueError, match=r"as 4xH200\. Kinds: H200, H100, A100") as caught:
        parse_cluster(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0xH200", "12xH100"])
def test_machines_are_whole(text: str) -> None:
    with pytest.raises(ValueError, match=r"--gpus '\d+x.*Use 1 to 8, or a multiple of 8"):
        parse_cluster(text)


def test_so_many_are_refused_before_they_are_simulated() -> None:
    with pytest.raises(ValueError, match="'8000xH100': the planner simulates at most 512"):
        parse_cluster("8000xH100")


@pytest.mark.parametrize("gib", [0, -1, float("nan"), float("inf")])
def test_a_host_has_some_memory(gib: float) -> None:
    with pytest.raises(ValueError, match=rf"--host-gib {gib}: .*Use a number above 0"):
        parse_cluster("H200", gib)


@pytest.mark.parametrize(
    ("degree", "per_node", "together"),
    [(1, 8, 1), (4, 8, 4), (8, 8, 8), (16, 8, 8), (3, 8, 1), (6, 8, 2), (12, 8, 4), (24, 8, 8)],
)
def test_how_many_gpus_of_every_group_lie_together(
    degree: int, per_node: int, together: int
) -> None:
    """The smallest part of a group that lies in a node, over the groups of three nodes."""
    assert gpus_together(degree, per_node) == together
    parts = [
        sum(rank // per_node == node for rank in range(first, first + degree))
        for first in range(0, 3 * per_node // degree * degree, degree)
        for node in range(3)
    ]
    assert min(part for part in parts if part) >= together


@pytest.mark.parametrize("degree", [3, 6, 12])
def test_groups_across_nodes_are_costed_so(degree: int) -> None:
    """In a ring of three GPUs of one node NVLink carries what a NIC carries between nodes."""
    cluster = parse_cluster("24xH100")
    assert not cluster.fills_nodes(degree)
    assert all(cluster.fills_nodes(fitting) for fitting in (1, 2, 4, 8, 24))
    job = llama_job("24xH100", 2**15)
    near = replace(cluster.hardware, gpus_per_node=24)
    within = replace(job, cluster=replace(cluster, hardware=near))
    seconds = [
        result_of(each, ulysses=1, ring=degree, checkpoint="none").time.attention
        for each in (job, within)
    ]
    assert seconds[0] > 1.02 * seconds[1]
