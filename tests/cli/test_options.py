"""Help, version and wrong usage. tests/docs compares the options with the reference page."""

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
