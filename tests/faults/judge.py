"""What has to be true of a job that a fault has ended, and of the next start."""

import re
from pathlib import Path
from typing import get_args

from tests.faults.plant import (
    BAD_STEP,
    DAMAGES,
    SAVE_EVERY,
    SIGNALS,
    STEPS,
    Fault,
    Kind,
    Place,
    damage,
)
from tests.faults.trial import Ended, Job, make_folder, outcome, run_job

STEP_TIMEOUT_S = 8.0
COMMAND = ["--resume", "auto"]
LIMITED = [*COMMAND, "--step-timeout", f"{STEP_TIMEOUT_S}", "--save-timeout", f"{STEP_TIMEOUT_S}"]
"""For a job with a rank that is stopped."""
LATE_S = 10.0
"""The bound of the promise: a job ends so much later than its time limit at most, counted from the
moment at which the fault strikes. Faults other than a stopped rank wait for no limit, and have the
same bound."""
HARNESS_S = 150.0
"""After which the harness kills a job, which has failed its trial then. It promises nothing: a
machine that others use may start a job late."""
ACCUSED: dict[Kind, str] = {
    "kill": r"rank (\d+) (?:\(process \d+\) is gone; |was ended by SIGKILL ).*",
    "stop": r"rank (\d+) \(process .*\) was stopped by a signal.*",
    "terminate": r"rank (\d+) (?:\(process \d+\) is gone; |was ended by SIGTERM).*",
    "exception": (
        r"rank (\d+) failed in (?:(?!rank \d).)*PlantedError: planted(?: \(while [^)]*\))?"
    ),
    "nan": r".*(?:first on rank|not finite on rank) (\d+)\b.*",
    "diverge": r".*the trained weights of rank (\d+) are not those of rank 0 .*",
    "full disk": r"rank (\d+) could not write .*",
}
"""What names a guilty rank. Other ranks say where they were, by name, but not in these words."""
FOUND_BY_OTHERS = r"(?m)^(?:watchdog: |  rank ).*|.*is gone; .*"
"""What ranks say that notice another one's end: where they were themselves."""
STOPPED = r"stopped by SIGTERM after step \d+, whose checkpoint is .*"
"""What is said where all ranks have stopped and saved together, of which none is guilty."""
WAITING = (
    rf"step {BAD_STEP}(?: \(while .* is written\))?, layer \d+, {{place}}, "
    r"attention's exchange by the plan '\w+', its step \d+ of \d+, "
    r"waits for rank (?:\d+, )*{rank}\b"
)
"""Where a rank that waits for one that was stopped says it is: step, layer and exchange."""
PLACES: dict[Place, str] = {
    "start": "in the start, before the end of the first step",
    "forward": rf"(?<!after )step {BAD_STEP}\b",
    "backward": rf"(?<!after )step {BAD_STEP}\b",
    # Trainers count the step as done once they have its gradients.
    "optimizer": rf"(?<!after )step [{BAD_STEP}{BAD_STEP + 1}]\b",
    "save": rf"saving after step {BAD_STEP}\b|checkpoint-{BAD_STEP}\b",
    "writing": rf"while \S*checkpoint-{BAD_STEP} is written",
    "final": rf"the end, after step {STEPS}\b",
}
STOPPED_AFTER: dict[Place, str] = dict.fromkeys(
    get_args(Place), rf"after step [{BAD_STEP}{BAD_STEP + 1}],"
) | {"start": "after step 1,", "writing": rf"after step [{BAD_STEP + 1}{BAD_STEP + 2}],"}
"""A signal is answered at the end of the step in which it comes, or of the next one."""
PLACES_OF_KIND: dict[tuple[Kind, Place], str] = {
    ("nan", "start"): "before the first step",
    ("nan", "forward"): rf"step {BAD_STEP}: .* first layer .* model\.layers\.\d+\.mlp",
    ("nan", "backward"): rf"step {BAD_STEP}: .* gradient of model\.layers\.\d+\.mlp's output",
    ("nan", "optimizer"): rf"after step {BAD_STEP}\b",
    ("diverge", "optimizer"): rf"after step {BAD_STEP} .* after step {BAD_STEP - SAVE_EVERY}, and",
    # Trainers have written the largest files of a checkpoint before the disk is full.
    **dict.fromkeys(
        [("full disk", "save"), ("full disk", "writing")],
        rf"write \S*checkpoint-[{BAD_STEP}-{STEPS}]/",
    ),
    ("full disk", "final"): r"write \S*/final\.incomplete/",
    # Others have gone on to the next steps, beside which a checkpoint is written.
    **{
        (kind, place): rf"{PLACES[place]}|(?<!after )step [{BAD_STEP + 1}{BAD_STEP + 2}]\b"
        for kind in get_args(Kind)
        for place in get_args(Place)
        if kind in SIGNALS and place in ("save", "writing")
    },
    # The launcher's signal may end the others before they say where they were.
    ("kill", "start"): rf"{PLACES['start']}|was ended by SIGKILL",
    ("kill", "final"): rf"{PLACES['final']}|was ended by SIGKILL",
    ("terminate", "final"): rf"{PLACES['final']}|was ended by SIGTERM",
}


class Good:
    """What undisturbed runs give: each is run once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[Job, object] = {}

    def __call__(self, job: Job) -> object:
        if job not in self._found:
            folder = make_folder(self._folder / job.name, job)
            ended = run_job(folder, COMMAND, None, HARNESS_S)
            assert ended.exit_code == 0, ended.said
            self._found[job] = outcome(folder)
        return self._found[job]


def tried(fault: Fault, folder: Path, job: Job, good_runs: Good) -> list[str]:
    """Run a job with the fault and then without; returns what was not as it has to be."""
    good = good_runs(job)
    if fault.kind in DAMAGES:
        problems = killed_at_its_end(folder, job, fault.rank)
        return problems or recovered(folder, _file_of(fault.rank, folder), fault.kind, good)
    make_folder(folder, job)
    ended = run_job(folder, LIMITED if fault.kind == "stop" else COMMAND, fault, HARNESS_S)
    resumed = run_job(folder, COMMAND, None, HARNESS_S)
    return [*_ending(fault, ended), *_going_on(resumed, folder, good)]


def killed_at_its_end(folder: Path, job: Job, rank: int) -> list[str]:
    """Make a folder whose job was killed after its last checkpoint, which is whole."""
    make_folder(folder, job)
    fault = Fault("kill", "final", rank)
    problems = _ending(fault, run_job(folder, COMMAND, fault, HARNESS_S))
    whole = (newest_checkpoint(folder) / "manifest.json").exists()
    return [*problems, *([] if whole else ["the last checkpoint is not complete"])]


def newest_checkpoint(folder: Path, step: int = STEPS) -> Path:
    return folder / f"out/checkpoint-{step}"


def _file_of(rank: int, folder: Path) -> Path:
    """A file of the newest checkpoint that this rank has written."""
    return newest_checkpoint(folder) / f"optimizer_state/__{rank}_0.distcp"


def recovered(folder: Path, file: Path, kind: Kind, good: object) -> list[str]:
    """Damage a file of the newest checkpoint and start again; returns what was not as it has to be:
    the file is named, the checkpoint before is taken, and the numbers are those of a good run."""
    name = file.relative_to(newest_checkpoint(folder)).as_posix()
    before = newest_checkpoint(folder, STEPS - SAVE_EVERY).name
    damage(file, kind)
    resumed = run_job(folder, COMMAND, None, HARNESS_S)
    wanted = (
        rf"a checkpoint is (damaged|incomplete): \S+: {re.escape(name)} (is|has) ",
        rf"going on from \S+/{before}, in which every file is whole",
    )
    missing = [each for each in wanted if not re.search(each, resumed.said)]
    said = [f"{each!r} is not said: {resumed.said[-3000:]}" for each in missing]
    return [*said, *_going_on(resumed, folder, good)]


def _ending(fault: Fault, ended: Ended) -> list[str]:
    problems = [*_end_of_processes(ended), *judge_words(fault, ended.said)]
    return [f"{problem}; it said:\n{ended.said[-3000:]}" for problem in problems]


def _end_of_processes(ended: Ended) -> list[str]:
    problems = []
    if ended.seconds_after is None:
        problems.append("the fault has not struck")
    elif ended.seconds_after > STEP_TIMEOUT_S + LATE_S:
        problems.append(f"the job went on for {ended.seconds_after:.0f} s after the fault")
    if ended.exit_code is None:
        problems.append("the job did not end")
    elif ended.exit_code == 0:
        problems.append("the job ended with exit code 0")
    if ended.orphans:
        problems.append(f"processes outlived the launcher: {ended.orphans}")
    return problems


def judge_words(fault: Fault, said: str) -> list[str]:
    """Whether what a job said names the guilty rank, no other one, and the place."""
    if fault.kind == "terminate" and (stopped := re.search(STOPPED, said)):
        return _place(stopped[0], STOPPED_AFTER[fault.place])
    accused = [(int(found[1]), found[0]) for found in re.finditer(ACCUSED[fault.kind], said)]
    ranks = sorted({rank for rank, _ in accused})
    if ranks != [fault.rank]:
        return [f"the guilty ranks are said to be {ranks}, not rank {fault.rank}"]
    words = [words for _, words in accused]
    if fault.kind in SIGNALS:  # such a rank can't say where it was
        words += re.findall(FOUND_BY_OTHERS, said)
    wanted = PLACES_OF_KIND.get((fault.kind, fault.place), PLACES[fault.place])
    problems = _place("\n".join(words), wanted)
    if fault.kind == "stop" and fault.place in ("forward", "backward"):
        where = WAITING.format(place=fault.place, rank=fault.rank)
        problems += [] if re.search(where, said) else [f"nobody waits for it in a layer: {where}"]
    return problems


def _place(words: str, wanted: str) -> list[str]:
    return [] if re.search(wanted, words) else [f"the place {wanted!r} is not in {words!r}"]


def _going_on(resumed: Ended, folder: Path, good: object) -> list[str]:
    if resumed.exit_code != 0:
        return [f"the next start ended with {resumed.exit_code}: {resumed.said[-3000:]}"]
    if outcome(folder) != good:
        return [f"the next start gave {outcome(folder)}, an undisturbed run {good}"]
    return []
