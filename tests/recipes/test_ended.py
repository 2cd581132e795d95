"""A run that has ended is started again: it says so, goes on if it is longer, or another one is
refused. Only the number of steps was compared, and another learning rate was said to have ended."""

import json
from functools import partial
from pathlib import Path

import pytest

from longctx_patch.recipes.metrics import read_metrics
from tests.recipes.conftest import Start


@pytest.fixture
def start(start: Start) -> Start:
    return partial(start, max_steps=2, scheduler="constant", resume="auto")


def state_of(output: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}


OTHERS = {
    "rate": (["--learning-rate", "0.25"], "learning_rate is 0.25, the run has 0.0001"),
    "rate, allowed for another": (
        ["--learning-rate", "0.25", "--allow-change", "weight_decay"],
        "learning_rate is 0.25",
    ),
    "schedule": (["--scheduler", "cosine"], "scheduler is 'cosine', the run has 'constant'"),
    "decay": (["--weight-decay", "0.5"], "weight_decay is 0.5, the run has 0.0"),
    "rows": (["--seq-len", "48"], "rows is '"),
    "rows of a step": (["--batch-size", "2"], "rows_per_step is 2, the run has 1"),
    "stages": (["--stages", "32:1,64:1"], "stages is '32:1,64:1', the run has ''"),
    "longer, and another rate": (
        ["--max-steps", "4", "--learning-rate", "0.25"],
        "To train its model on, add --allow-change learning_rate.",
    ),
}


def test_another_run_than_the_one_that_has_ended_is_refused(
    start: Start, capsys: pytest.CaptureFixture[str], text_file: Path, tmp_path: Path
) -> None:
    output = start("--save-every", "2")
    before = state_of(output)
    for flags, words in OTHERS.values():
        with pytest.raises(ValueError, match="has ended, and was another one") as refused:
            start(*flags)
        assert words in str(refused.value)
        assert "Give a new output to train this one." in str(refused.value)
    moved = text_file.rename(tmp_path / "moved.txt")
    for same in (
        [],
        ["--keep-last", "1"],
        ["--learning-rate", "0.25", "--allow-change", "learning_rate"],
    ):
        capsys.readouterr()
        start("--text", str(moved), *same)
        assert f"resume: the run has ended, and {output}/final is there" in capsys.readouterr().out
    assert state_of(output) == before  # nor is there a failure.json, which a report would show
    moved.write_text("other " + moved.read_text()[6:], encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows is '.*', the run has '"):
        start("--text", str(moved))


def test_a_longer_run_goes_on_from_its_checkpoint(start: Start) -> None:
    """Without one it would have begun anew, over the model that is there."""
    output, alone = start("--save-every", "2"), start(folder="alone")
    start("--max-steps", "4")
    assert [line["step"] for line in read_metrics(output)] == [1, 2, 3, 4]
    assert json.loads((output / "settings.json").read_text())["ended"]
    before = state_of(alone)
    with pytest.raises(ValueError, match=r"has no checkpoint to go on from\. Give a new output"):
        start("--max-steps", "4", folder="alone")
    assert state_of(alone) == before


def test_a_shorter_run_than_what_is_done_is_refused(start: Start) -> None:
    """It wrote the model of more steps than were asked for, and said that it had ended."""
    output = start("--save-every", "1")
    before = state_of(output)
    for resume in ("auto", "yes"):
        with pytest.raises(ValueError, match=r"checkpoint-2 has 2 steps, and max_steps=1: no step"):
            start("--max-steps", "1", "--resume", resume)
    assert state_of(output) == before


def test_weights_that_are_gone_from_the_machine_are_not_others(start: Start) -> None:
    """Weights of a hub name lie in a cache, which somebody may have emptied since."""
    output = start()
    record = json.loads((output / "settings.json").read_text())
    record["fingerprint"]["weights"] = {"model.safetensors": "8 bytes, sample aa"}
    (output / "settings.json").write_text(json.dumps(record))
    before = state_of(output)
    start()
    assert state_of(output) == before
