"""What a start says of its stages."""

import json
from pathlib import Path

import pytest

from longctx_patch.recipes.stages import START_FILE, Stages


def test_each_stage_is_named_as_it_begins_and_all_are_summed_up_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([102.5, 103.0, 110.25])
    stages = Stages(speaks=True, launched=100.0, now=lambda: next(clock))
    stages.enter("model")
    assert capsys.readouterr().out == "[  2.5 s] model\n"
    stages.enter("first step")
    stages.end(tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "[  3.0 s] first step",
        "[ 10.2 s] the first step is done: launch and imports 2.5, model 0.5, first step 7.2",
    ]
    written = json.loads((tmp_path / START_FILE).read_text())
    assert written["seconds"] == {"launch and imports": 2.5, "model": 0.5, "first step": 7.25}


def test_other_processes_say_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = Stages(speaks=False)
    stages.enter("model")
    stages.end(tmp_path)
    assert not capsys.readouterr().out
    assert not list(tmp_path.iterdir())
