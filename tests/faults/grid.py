"""Every fault of every kind, place and rank: `make test-fault-grid`.

Both recipes with all faults on 2 and 4 processes; DPO, a plain trainer and a mesh of replicas with
one fault of each kind; and a resume from a checkpoint of which one file of each kind is damaged.
"""

import shutil
from itertools import cycle
from pathlib import Path

import pytest

from tests.faults.judge import Good, killed_at_its_end, newest_checkpoint, recovered, tried
from tests.faults.plant import DAMAGES, Fault, Kind, faults
from tests.faults.trial import Job

SOME = (
    Fault("kill", "backward", 1),
    Fault("stop", "forward", 1),
    Fault("terminate", "backward", 0),
    Fault("exception", "save", 1),
    Fault("nan", "forward", 1),
    Fault("full disk", "save", 0),
    Fault("flip", "save", 1),
)
LATE = (Fault("kill", "writing", 1), Fault("stop", "writing", 0), Fault("exception", "writing", 0))
WIDER = {
    Job("trainer", 2): tuple(each for each in SOME if each.kind != "full disk"),
    Job("dpo", 2): (*SOME, *LATE),
    Job("finetune", 4, num_replicas=2): (*SOME, Fault("nan", "backward", 3)),
}
TRIALS = [
    *(
        (Job(recipe, n), fault)
        for n in (2, 4)
        for recipe in ("finetune", "sft")
        for fault in faults(n)
    ),
    *((job, fault) for job, some in WIDER.items() for fault in some),
]
STATES = (
    "optimizer_state/__0_0.distcp",
    "optimizer_state/__1_0.distcp",
    "optimizer_state/.metadata",
)
FILES = (
    *STATES,
    *("rng_state_0.pth", "rng_state_1.pth", "run.json", "scheduler.pt", "trainer_state.json"),
    *("config.json", "model.safetensors", "manifest.json"),
)
DAMAGED = [
    (Job(recipe, 2), name, kind)
    for recipe in ("finetune", "sft")
    for name, kind in zip(FILES, cycle(DAMAGES), strict=False)
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    return Good(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[Job, Path]:
    """Run folders of jobs that were killed after their last checkpoint."""
    folders = {}
    for job in {job for job, _, _ in DAMAGED}:
        folders[job] = tmp_path_factory.mktemp("killed") / "run"
        assert killed_at_its_end(folders[job], job, rank=1) == []
    return folders


@pytest.mark.parametrize(
    ("job", "fault"), [pytest.param(*each, id=f"{each[0].name}-{each[1].name}") for each in TRIALS]
)
def test_a_job_ends_and_the_next_start_goes_on(
    job: Job, fault: Fault, good: Good, tmp_path: Path
) -> None:
    assert tried(fault, tmp_path / "run", job, good) == []


@pytest.mark.parametrize(
    ("job", "name", "kind"),
    [pytest.param(*each, id=f"{each[0].name}-{each[2]} {each[1]}") for each in DAMAGED],
)
def test_a_job_goes_on_from_the_checkpoint_before_a_damaged_one(
    job: Job, name: str, kind: Kind, good: Good, killed: dict[Job, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed[job], folder)
    assert recovered(folder, newest_checkpoint(folder) / name, kind, good(job)) == []
