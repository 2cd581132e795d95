"""What has to be true of a job that a fault has ended, and of the next start."""

import re
from pathlib import Path

from tests.faults.plant import DAMAGES, STEPS, Fault, damage
from tests.faults.trial import Ended, Recipe, make_folder, outcome, run_job

STEP_TIMEOUT_S = 5
TIMEOUTS = {"start_timeout": 20, "step_timeout": STEP_TIMEOUT_S, "save_timeout": STEP_TIMEOUT_S}
LIMIT_S = 60.0
"""After which a job is killed, and has failed its trial."""
LATE_S = 10.0
"""How much later than its limit a stopped rank may end its job."""
START_S = 10.0
"""What a start and its good steps take at most, where other programs share the machine."""
PLACES = {
    "start": "step 1|start",
    "forward": "step 4",
    "backward": "step 4",
    "optimizer": "step [45]",  # trainers count the step as done once they have its gradients
    "save": "sav(e|ing)",
    "final": f"sav(e|ing)|final|step {STEPS}",
}


class Good:
    """What undisturbed runs give: each is run once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[Recipe, int], object] = {}

    def __call__(self, recipe: Recipe, num_ranks: int) -> object:
        key = (recipe, num_ranks)
        if key not in self._found:
            folder = make_folder(self._folder / f"{recipe}_{num_ranks}", num_ranks, recipe)
            ended = run_job(folder, [], None, LIMIT_S)
            assert ended.exit_code == 0, ended.said
            self._found[key] = outcome(folder)
        return self._found[key]


def tried(fault: Fault, folder: Path, num_ranks: int, recipe: Recipe, good_runs: Good) -> list[str]:
    """Run a job with the fault and then without; returns what was not as it has to be."""
    good = good_runs(recipe, num_ranks)
    make_folder(folder, num_ranks, recipe, **TIMEOUTS)
    if fault.kind in DAMAGES:
        return _damaged(fault, folder, good)
    ended = run_job(folder, ["--resume", "auto"], fault, LIMIT_S)
    resumed = run_job(folder, ["--resume", "auto"], None, LIMIT_S)
    return [*_ending(fault, ended), *_going_on(resumed, folder, good)]


def _damaged(fault: Fault, folder: Path, good: object) -> list[str]:
    """A job is killed after its last checkpoint, of which a file of this rank is damaged."""
    run_job(folder, ["--resume", "auto"], Fault("kill", "final", fault.rank), LIMIT_S)
    file = _file_of(fault.rank, folder / "out")
    damage(file, fault.kind)
    resumed = run_job(folder, ["--resume", "auto"], None, LIMIT_S)
    named = [] if file.name in resumed.said else [f"{file.name} is not named: {resumed.said}"]
    return [*named, *_going_on(resumed, folder, good)]


def _file_of(rank: int, output: Path) -> Path:
    """A file of the newest checkpoint that this rank has written."""
    states = output / f"checkpoints/step_{STEPS:06d}/state"
    if states.exists():
        return states / f"__{rank}_0.distcp"
    return output / f"checkpoint-{STEPS}/rng_state_{rank}.pth"  # trainers save the last step too


def _ending(fault: Fault, ended: Ended) -> list[str]:
    problems = []
    if ended.exit_code is None:
        problems.append(f"the job went on for {ended.seconds:.0f} s")
    elif ended.exit_code == 0:
        problems.append("the job ended with exit code 0")
    limit = START_S + LATE_S + (STEP_TIMEOUT_S if fault.kind == "stop" else 0.0)
    if ended.seconds > limit:
        problems.append(
            f"the job took {ended.seconds:.0f} s to end, at most {limit:.0f} s are good"
        )
    if ended.orphans:
        problems.append(f"processes outlived the launcher: {ended.orphans}")
    stopped = fault.kind == "terminate" and "stopped by SIGTERM after step" in ended.said
    # All ranks have stopped and saved together then, and a launcher signals all of them.
    if not stopped and not re.search(rf"(rank|process) {fault.rank}\b", ended.said, re.IGNORECASE):
        problems.append(f"rank {fault.rank} is not named")
    if fault.kind in ("stop", "nan") and not re.search(PLACES[fault.place], ended.said):
        problems.append(f"the place is not named: {PLACES[fault.place]}")
    return [f"{problem}; it said:\n{ended.said[-1500:]}" for problem in problems]


def _going_on(resumed: Ended, folder: Path, good: object) -> list[str]:
    if resumed.exit_code != 0:
        return [f"the next start ended with {resumed.exit_code}: {resumed.said[-3000:]}"]
    if outcome(folder) != good:
        return [f"the next start gave {outcome(folder)}, an undisturbed run {good}"]
    return []
