"""Help, version and wrong usage. tests/docs compares the options with the reference page."""

import errno
import os

import pytest

from longctx_patch.recipes.launch import one_message
from tests.cli.conftest import Run


def test_help_and_version(run: Run) -> None:
    for words in (["--help"], ["patch", "-h"], ["verify", "--help"], ["--version"]):
        result = run(*words)
        assert result.exit_code == 0
        assert result.output


def test_commands_come_in_groups(run: Run) -> None:
    said = run("--help").output
    places = [said.index(f"\n  {name} ") for name in ("patch", "data", "train", "report", "merge")]
    titles = [said.index(title) for title in ("Every run:", "Proof and machine:", "To look at:")]
    assert sorted([*titles, *places]) == [titles[0], *places, *titles[1:]]
    assert "..." not in said.partition("Every run:")[2]


def test_wrong_usage_is_exit_code_2(run: Run) -> None:
    for words in (["patch", "m"], ["verify", "m", "--layout", "spiral"], ["train"]):
        assert run(*words).exit_code == 2


def test_ctrl_c_anywhere_is_exit_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("longctx_patch.cli.families.answer_for", interrupted)
    result = run("families", "llama")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted by Ctrl-C.\n"


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "Make room there"), (errno.EMFILE, "ulimit -n"), (errno.EROFS, "TMPDIR")],
)
def test_what_the_system_refuses_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refused(_: str) -> None:
        raise OSError(number, os.strerror(number), "/dev/shm")

    monkeypatch.setattr("longctx_patch.cli.families.answer_for", refused)
    result = run("families", "llama")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {os.strerror(number)}: /dev/shm. ")
    assert advice in result.stderr
    with pytest.raises(SystemExit), one_message("finetune"):
        refused("")
