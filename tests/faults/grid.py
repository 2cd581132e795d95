"""Every fault of every kind, place and rank: `make test-fault-grid`."""

from pathlib import Path

import pytest

from tests.faults.judge import Good, tried
from tests.faults.plant import Fault, faults
from tests.faults.trial import Recipe

RECIPES: tuple[Recipe, ...] = ("finetune", "sft")
TRIALS = [
    pytest.param(recipe, num_ranks, fault, id=f"{recipe}-{num_ranks} ranks-{fault.name}")
    for recipe in RECIPES
    for num_ranks in (2, 4)
    for fault in faults(num_ranks)
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    return Good(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize(("recipe", "num_ranks", "fault"), TRIALS)
def test_a_job_ends_and_the_next_start_goes_on(
    recipe: Recipe, num_ranks: int, fault: Fault, good: Good, tmp_path: Path
) -> None:
    assert tried(fault, tmp_path / "run", num_ranks, recipe, good) == []
