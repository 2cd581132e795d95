"""Predictions against what was measured on GPUs."""

from pathlib import Path

import pytest

from longctx_patch.planner.components import layer_bytes
from longctx_patch.planner.machine import GIB
from tests.planner.jobs import candidate, llama_job
from tests.planner.measured import MEASURED, Measured

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[:4]}")
def test_peak_and_seconds_are_near_what_was_measured(row: Measured) -> None:
    found = row.predicted()
    assert found.memory.total / GIB == pytest.approx(row.peak_gib, rel=0.07)
    assert found.time.total == pytest.approx(row.seconds, rel=0.12)


def test_a_layer_keeps_what_was_metered_on_h200() -> None:
    layer = layer_bytes(llama_job("4xH200", 131072), candidate(ulysses=4))
    assert layer.whole == 147_592


def test_the_page_has_this_table() -> None:
    page = PAGE.read_text()
    for row in MEASURED:
        assert row.line() in page, "put what `python -m tests.planner.measured` prints there"
