"""How far float32 rounds a stock model's gradients where it keeps few of their digits, as in the
sums of products of many decays that a recurrence is.

One run is one draw of these errors, which another processor draws anew: of Qwen3-Next they lie
between 1e-5 and 9e-5. So several are drawn, by moving each weight by at most half a rounding.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.reference import relative_error

DRAWS = 4


def rounded_anew(model: Any, seed: int) -> Any:
    """The model with weights moved by at most half the distance to the next number."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            moves = torch.rand(weight.shape, generator=draw, dtype=torch.float64) - 0.5
            weight.copy_(weight.double() * (1 + 2**-23 * moves))
    return model


def own_errors(
    exact: Mapping[str, Tensor], drawn: Callable[[int], Mapping[str, Tensor]]
) -> dict[str, float]:
    """The largest error of each gradient over some draws; `drawn(seed)` are a stock model's in
    float32, with `rounded_anew` weights."""
    draws = [drawn(seed) for seed in range(DRAWS)]
    return {
        name: max(relative_error(draw[name], value) for draw in draws)
        for name, value in exact.items()
    }
