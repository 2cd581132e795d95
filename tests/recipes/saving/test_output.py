"""`--resume auto`: one command starts, goes on, and finds that a run has ended."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx_patch.checkpoints.names import steps_of
from longctx_patch.recipes import finetune
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.saving.output import resume_name
from longctx_patch.recipes.settings import parse_settings

Start = Callable[..., Path]


@pytest.fixture
def start(config_file: Path, text_file: Path, tmp_path: Path) -> Start:
    def started(*flags: str) -> Path:
        pairs = {"model": config_file, "text": text_file, "output": tmp_path / "out"}
        given = [word for name, value in pairs.items() for word in (f"--{name}", str(value))]
        finetune.main([*given, "--seq-len", "64", "--max-steps", "5", *flags])
        return tmp_path / "out"

    return started


def numbers(output: Path) -> list[tuple[float, ...]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(output)]


def test_one_command_starts_goes_on_and_ends(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("--resume", "auto", "--save-every", "1", "--keep-last", "2", "--keep-every", "2")
    output = start(*command)
    assert "resume: starting from the first step" in capsys.readouterr().out
    series, whole = steps_of(output), numbers(output)
    assert [each.step for each in series.found()] == [2, 4, 5]
    shutil.rmtree(output / "final")
    shutil.rmtree(series.path_of(5))
    (series.path_of(4) / "manifest.json").unlink()  # killed while it was saved
    start(*command)
    said = capsys.readouterr().out
    assert "a checkpoint is incomplete" in said
    assert f"resume: going on from {series.path_of(2)}" in said
    assert numbers(output) == whole
    assert (output / "final" / "README.md").is_file()
    # Where there is no whole checkpoint yet, it starts anew.
    shutil.rmtree(output / "final")
    for each in series.found():
        (each.path / "manifest.json").unlink()
    start(*command)
    assert "resume: starting from the first step" in capsys.readouterr().out
    assert numbers(output) == whole
    before = (output / "final" / "README.md").stat().st_mtime_ns
    start(*command)
    assert "resume: the run has ended" in capsys.readouterr().out
    assert (output / "final" / "README.md").stat().st_mtime_ns == before
    assert not list(output.glob(".*"))


def test_auto_never_begins_among_files_of_others(start: Start, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="no run of this recipe has begun there"):
        start("--resume", "auto")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("words", "line", "found"),
    [
        ([], "", "no"),
        ([], "resume: true", "yes"),
        ([], "resume: auto", "auto"),
        (["--resume"], "", "yes"),
        (["--resume", "auto"], "resume: no", "auto"),
        (["--resume", "no"], "resume: yes", "no"),
    ],
)
def test_resume_in_words(words: list[str], line: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "finetune.yaml"
    file.write_text(f"model: m\ntext: t\nseq_len: 64\noutput: out\n{line}\n")
    assert parse_settings(["--settings", str(file), *words]).resume == found


def test_other_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume='aut'.*auto"):
        resume_name("aut")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--keep-every", "4"], "keep_every=4 without keep_last"),
        (["--keep-every", "4", "--keep-last", "1", "--save-every", "3"], "multiple of save_every"),
        (["--keep-last", "-1"], "keep_last=-1: it must be 0 or more"),
    ],
)
def test_retention_that_keeps_nothing_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_settings(["--model=m", "--text=t", "--seq-len=64", "--output=o", *flags])
