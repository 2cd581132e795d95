"""The judge of jobs: only the guilty rank's own line counts, with the place in it."""

import pytest

from tests.faults.judge import judge_words
from tests.faults.plant import Fault

EXCHANGE = (
    "attention's exchange by the plan 'zigzag', its step 1 of 3, waits for rank 1, at x.py:23 f"
)
STOPPED = f"""watchdog: step 4 has taken longer than its limit of 5 s on rank 0, so the job ends.
rank 1 (process 42 on vm) was stopped by a signal.
  rank 0: step 4, layer 1, backward, {EXCHANGE}
A limit is raised with --step-timeout, --start-timeout or --save-timeout SECONDS (TimeLimits)."""
GONE = "rank 1 (process 5) is gone"
KILLED = f"""watchdog: {GONE}; rank 0 failed in step 4: layer 1, forward, {EXCHANGE}
rank 1 was ended by SIGKILL (often the system, when the host's memory is full)."""
RAISED = "watchdog: rank 0 failed in step 4: at faults/plant.py:99 strike_at: PlantedError: planted"
RAISED_BESIDE = f"{RAISED.replace('step 4', 'step 6')} (while step_000004 is written)"
OF_ANOTHER = (
    "watchdog: rank 0 failed in step 5: at x.py:1 f: SavingError: rank 1 failed in saving or "
    "reading out/checkpoints/step_000004/state: PlantedError: planted"
)
BAD_LOSS = (
    "finetune: step 4: the loss is nan on rank 0, 1; first on rank 1: the first layer with an "
    "output that is not finite is model.layers.0.mlp (1,024 of 1,024 values)"
)
FULL = "finetune: rank 1 could not write out/checkpoints/step_000004/state: File too large."
SIGNALLED = "stopped by SIGTERM after step 5, whose checkpoint is out/checkpoint-5. Go on."


@pytest.mark.parametrize(
    ("right", "said"),
    [
        (Fault("stop", "backward", 1), STOPPED),
        (Fault("kill", "forward", 1), KILLED),
        (Fault("exception", "forward", 0), RAISED),
        (Fault("exception", "save", 1), OF_ANOTHER),
        (Fault("exception", "writing", 0), RAISED_BESIDE),
        (Fault("nan", "forward", 1), BAD_LOSS),
        (Fault("full disk", "save", 1), FULL),
        (Fault("terminate", "save", 1), SIGNALLED),
    ],
    ids=lambda each: getattr(each, "kind", ""),
)
def test_the_guilty_rank_and_its_place_have_to_be_said(right: Fault, said: str) -> None:
    assert judge_words(right, said) == []
    another = Fault(right.kind, right.place, 1 - right.rank)
    if right.kind != "terminate":  # all ranks have stopped together
        assert judge_words(another, said) == [
            f"the guilty ranks are said to be [{right.rank}], not rank {another.rank}"
        ]
    (problem,) = judge_words(Fault(right.kind, "start", right.rank), said)
    assert problem.startswith("the place ")
    assert judge_words(Fault(right.kind, right.place, right.rank), "rank 0: step 4") == [
        f"the guilty ranks are said to be [], not rank {right.rank}"
    ]


def test_two_guilty_ranks_are_one_too_many() -> None:
    both = f"{KILLED}\nrank 0 was ended by SIGKILL (often)."
    (problem,) = judge_words(Fault("kill", "forward", 1), both)
    assert problem == "the guilty ranks are said to be [0, 1], not rank 1"


def test_a_rank_that_was_stopped_in_a_layer_has_one_that_waits_for_it_there() -> None:
    (problem,) = judge_words(Fault("stop", "backward", 1), STOPPED.replace("layer 1, ", ""))
    assert problem.startswith("nobody waits for it in a layer")
    (problem,) = judge_words(Fault("stop", "forward", 1), STOPPED)
    assert problem.startswith("nobody waits for it in a layer")
