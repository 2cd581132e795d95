"""Some of all faults: each kind, place and rank. `make test-fault-grid` tries all of them."""

from pathlib import Path

import pytest

from tests.faults.judge import Good, tried
from tests.faults.plant import Fault, faults
from tests.faults.trial import Recipe

CHOSEN: dict[Recipe, list[Fault]] = {
    "finetune": [
        Fault("kill", "save", 1),
        Fault("stop", "backward", 1),
        Fault("terminate", "forward", 0),
        Fault("exception", "final", 0),
        Fault("nan", "forward", 1),
        Fault("full disk", "save", 0),
        Fault("flip", "save", 1),
    ],
    "sft": [
        Fault("kill", "start", 0),
        Fault("terminate", "optimizer", 1),
        Fault("nan", "backward", 1),
        Fault("truncate", "save", 0),
        Fault("delete", "save", 1),
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
    assert tried(fault, tmp_path / "run", 2, recipe, good) == []


def test_the_chosen_ones_cover_kinds_places_and_ranks() -> None:
    """And `faults` leaves nothing out."""
    chosen = [fault for _, fault in TRIALS]
    assert set(chosen) <= set(faults(2))
    for names in ("kind", "place", "rank"):
        assert {getattr(f, names) for f in chosen} == {getattr(f, names) for f in faults(2)}
    for num_ranks in (2, 4):
        assert len(set(faults(num_ranks))) == len(faults(num_ranks)) == 31 * num_ranks + 2
