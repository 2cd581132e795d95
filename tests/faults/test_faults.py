"""Some of all faults, each of another kind. `make test-fault-grid` tries all of them."""

import json
import re
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.judge import HARNESS_S, Good, tried
from tests.faults.plant import Fault
from tests.faults.trial import (
    Job,
    Recipe,
    make_folder,
    of_session,
    outcome,
    run_job,
    start_job,
)

CHOSEN: dict[Recipe, list[Fault]] = {
    "finetune": [
        Fault("stop", "backward", 1),
        Fault("terminate", "forward", 0),
        Fault("diverge", "optimizer", 1),
        Fault("full disk", "save", 0),
    ],
    "sft": [
        Fault("kill", "start", 0),
        Fault("exception", "writing", 0),
    ],
}
TRIALS = [(recipe, fault) for recipe, chosen in CHOSEN.items() for fault in chosen]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    return Good(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize(("recipe", "fault"), TRIALS, ids=lambda each: getattr(each, "name", each))
def test_a_job_ends_and_the_next_start_goes_on(
    recipe: Recipe, fault: Fault, good: Good, tmp_path: Path
) -> None:
    assert tried(fault, tmp_path / "run", Job(recipe, 2), good) == []


def test_an_output_is_of_one_job_and_one_model_also_beside_a_killed_launcher(
    good: Good, tmp_path: Path
) -> None:
    """A second job beside one that hangs is refused; once the launcher is killed, one with another
    config too; and then the same command goes on, from the lock that was left."""
    folder = make_folder(tmp_path / "run", Job("finetune", 2))
    command, checkpoint = ["--resume", "auto"], folder / "out/checkpoint-2"
    # As the second checkpoint is written: the first one is complete then.
    first = start_job(folder, tmp_path / "first.txt", command, Fault("stop", "save", 1))
    try:
        deadline = time.monotonic() + HARNESS_S
        while not stopped(first.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        refused = run_job(folder, command, None, HARNESS_S)
        assert refused.exit_code == 1
        assert re.search(r"out' is in use: process \d+ on .* writes there", refused.said)
        assert first.is_alive()
    finally:
        first.kill()
        first.join()
    while not all(is_stopped(each) for each in of_session(first.pid)):
        time.sleep(0.05)
    for left in of_session(first.pid):  # a stopped rank gets no signal that could end it but this
        left.kill()
    config, model = folder / "config.json", (folder / "config.json").read_text()
    config.write_text(json.dumps(json.loads(model) | {"num_hidden_layers": 3}))
    other = run_job(folder, command, None, HARNESS_S)
    assert other.exit_code == 1
    assert "the lock of a job that is over is taken over" in other.said
    assert "config.num_hidden_layers is 3, the run has 2" in other.said
    config.write_text(model)
    ended = run_job(folder, command, None, HARNESS_S)
    assert f"going on from {checkpoint.relative_to(folder)}" in ended.said
    assert (ended.exit_code, ended.orphans) == (0, [])
    assert outcome(folder) == good(Job("finetune", 2))


def stopped(session: int) -> bool:
    """Whether a process of a job has stopped."""
    return any(map(is_stopped, of_session(session)))


def is_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)
