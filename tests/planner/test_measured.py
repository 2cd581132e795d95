"""Predictions are near what was measured on GPUs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from longctx_patch.planner.job import Job, parse_cluster
from longctx_patch.planner.layer_bytes import checkpoint_bytes, layer_bytes
from longctx_patch.planner.machines import GIB
from longctx_patch.planner.model_shape import shape_of
from longctx_patch.planner.named_models import NAMED
from tests.planner.jobs import candidate, hybrid_job, llama_job
from tests.planner.measured import AFTERWARDS, IN_VIEW, Measured, accuracy

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "planner.md"


@pytest.mark.parametrize("row", [*IN_VIEW, *AFTERWARDS], ids=lambda row: f"{row.gpus} {row.run}")
def test_what_is_predicted_is_near_what_was_measured(row: Measured) -> None:
    found = row.predicted()
    assert found.memory.total / GIB == pytest.approx(row.peak_gib, rel=0.07)
    assert found.time.total == pytest.approx(row.seconds, rel=0.12)
    if row.host_gib is not None:
        assert found.host_bytes / GIB == pytest.approx(row.host_gib, rel=0.05)


def test_a_layer_keeps_what_was_metered_on_h200() -> None:
    job = llama_job("4xH200", 131072)
    assert layer_bytes(job, candidate(ulysses=4), job.shape.layers[0]).whole == 147_592


@pytest.mark.parametrize(
    ("fused", "delta_net", "attention"), [(True, 209_608, 145_496), (False, 283_337, 258_137)]
)
def test_layers_of_two_kinds_keep_what_was_metered_on_h100s(
    fused: bool, delta_net: int, attention: int
) -> None:
    """Bytes for each token that `auto` measured of a layer beyond those of a recomputed one, where
    the last layer was the one with attention. Such a measure has the layer's output too, which
    stock layers don't keep, and half a byte for what norms make of their weights."""
    job = replace(hybrid_job("H100", 65536), fused_layers=fused, fsdp=False)
    net, attends = (layer_bytes(job, candidate(8), job.shape.layers[number]) for number in (6, 7))
    found = [each.whole - checkpoint_bytes(candidate(8), each) for each in (net, attends)]
    output = 0 if fused else 2 * job.shape.hidden_size
    assert [found[0], found[1] + output] == pytest.approx([delta_net, attention], abs=1)
    assert [checkpoint_bytes(candidate(8), each) for each in (net, attends)] == [8192, 16448]


def test_layers_with_frozen_experts_keep_what_was_metered_on_an_h200() -> None:
    """Bytes for each token under an adapter, which `auto` measured with what recomputed ones
    keep; to 0.1 %, since small tensors of the adapter are counted roughly."""
    model = NAMED["Qwen/Qwen3.5-35B-A3B"]
    job = Job(
        shape=shape_of(model.config(), model.name),
        cluster=parse_cluster("H200"),
        seq_len=65536,
        fsdp=False,
        lora=True,
    )
    net, attends = (layer_bytes(job, candidate(40), job.shape.layers[n]).whole for n in (38, 39))
    assert [net, attends] == pytest.approx([186_544, 135_903], rel=1e-3)


def test_the_page_has_this_table() -> None:
    page = PAGE.read_text()
    for row in AFTERWARDS:
        assert row.line() in page, "put what `python -m tests.planner.measured` prints there"


def test_every_page_gives_the_accuracy_that_the_table_has() -> None:
    """In sentences like `25 runs that`, the number and each percentage come from the table."""
    found = accuracy()
    allowed = {f"{share:g} %" for share in (found.peak, found.seconds, found.host)}
    said = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for paragraph in page.read_text().split("\n\n"):
            for sentence in re.split(r"[.;](?=\s)", paragraph):
                if runs := re.search(r"(\d+) runs\s+that", sentence):
                    assert int(runs[1]) == found.num_runs, f"{page}: {sentence}"
                    shares = set(re.findall(r"[\d.]+ %", sentence))
                    assert shares <= allowed, f"{page}: {sentence}: {found}"
                    said |= shares
    assert said >= {f"{found.peak:g} %", f"{found.seconds:g} %"}, "no page says how near it comes"
