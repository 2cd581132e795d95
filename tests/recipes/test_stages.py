"""What a start says of its stages."""

import json
from pathlib import Path

import pytest

from longctx_patch.recipes.stages import START_FILE, Stages


@pytest.mark.parametrize("speaks", [True, False])
def test_each_stage_is_named_as_it_begins_and_all_are_summed_up_at_the_end(
    speaks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process says and writes it."""
    clock = iter([102.5, 103.0, 110.25])
    stages = Stages(speaks=speaks, launched=100.0, now=lambda: next(clock))
    stages.enter("model")
    assert capsys.readouterr().out == "[  2.5 s] model\n" * speaks
    stages.enter("first step")
    stages.end(tmp_path)
    ended = "the first step is done: launch and imports 2.5, model 0.5, first step 7.2"
    said = ["[  3.0 s] first step", f"[ 10.2 s] {ended}"]
    assert capsys.readouterr().out.splitlines() == said * speaks
    assert [path.name for path in tmp_path.iterdir()] == [START_FILE] * speaks
    if speaks:
        written = json.loads((tmp_path / START_FILE).read_text())["seconds"]
        assert written == {"launch and imports": 2.5, "model": 0.5, "first step": 7.25}
