"""Weights that are no numbers are named, with the rank that has them, before they are saved."""

import pytest
import torch
from torch import nn

from longctx_patch.health.weights import check_saved_weights, check_weights
from tests.harness import run_distributed

CPU = torch.device("cpu")


def model(odd: float | None = None) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if odd is not None:
        made.get_parameter("1.weight").data[1, 3] = odd
    return made


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_the_weight_is_named(odd: float) -> None:
    check_weights(model(), CPU)
    check_saved_weights(model(), CPU, 3)
    named = "weight 1.weight has 1 values that are not finite on rank 0, "
    with pytest.raises(ValueError, match=named + "before the first step.*that it was loaded from"):
        check_weights(model(odd), CPU)
    with pytest.raises(ValueError, match=named + "after step 3, so nothing of it is saved"):
        check_saved_weights(model(odd), CPU, 3)


def refusal_of(rank: int) -> str:
    check_saved_weights(model(), CPU, 7, together=False)
    if rank == 1:  # alone: the other one waits for nothing
        with pytest.raises(ValueError, match=r"1\.weight has 1 values .* on rank 1"):
            check_saved_weights(model(torch.nan), CPU, 7, together=False)
    with pytest.raises(ValueError) as refused:
        check_saved_weights(model(torch.nan if rank == 1 else None), CPU, 7)
    return str(refused.value)


def test_all_ranks_refuse_what_one_has() -> None:
    first, second = run_distributed(refusal_of, 2)
    assert first == second
    assert "on rank 1, after step 7" in first
