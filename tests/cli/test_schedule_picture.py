"""A notebook shows the schedule of a config."""

import sys
from typing import BinaryIO

import pytest

from longctx_patch import LongContextConfig, Workload
from longctx_patch.cli import timeline
from longctx_patch.cli.timeline import draw_schedule
from longctx_patch.planner.attention_cost import Prediction
from longctx_patch.plans import Direction

WORKLOAD = Workload(num_tokens=131072)


def test_the_picture_is_of_what_the_config_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Prediction, str]] = []

    really = timeline.draw

    def draw(prediction: Prediction, file: BinaryIO, *, caption: str) -> None:
        drawn.append((prediction, caption))
        really(prediction, file, caption=caption)

    monkeypatch.setattr(timeline, "draw", draw)
    config = LongContextConfig(ulysses_degree=2, ring_degree=2, plan="zigzag", hardware="h200")
    picture = draw_schedule(config, WORKLOAD, "backward")
    ((prediction, caption),) = drawn
    assert (prediction.plan, prediction.ranks) == ("zigzag", 4)
    assert (prediction.ulysses_degree, prediction.direction) == (2, Direction.BACKWARD)
    assert "131,072 tokens" in caption
    assert "h200" in caption
    assert picture._repr_png_().startswith(b"\x89PNG\r\n")
    assert repr(picture) == f"<picture of {len(picture.png)} bytes>"


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("longctx_patch.cli.timeline.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"draw_schedule: .*pip install longctx-patch\[draw\]"):
        draw_schedule(LongContextConfig(ring_degree=4), WORKLOAD)


def test_more_ranks_than_can_be_read() -> None:
    with pytest.raises(ValueError, match=r"ring_degree=128 = 128 ranks.* Use smaller degrees"):
        draw_schedule(LongContextConfig(ring_degree=128), WORKLOAD)
