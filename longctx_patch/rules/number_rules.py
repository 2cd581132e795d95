"""Settings that can't give finite numbers are refused before a model is built."""

import dataclasses
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

MOST_TOKENS = 2**30
_UNITS = {"k": 2**10, "m": 2**20}
_TOKENS = r"(-?(?:\d[\d_]*|\d{1,3}(?:,\d{3})+)(?:\.\d+)?) ?([km]?)"
"""A comma separates thousands: 1,5M is refused, not read as 15M."""

HIGHEST_LEARNING_RATE = 100.0
"""Adam moves each weight by about the learning rate in a step, and weights of language models are
mostly far below 1; SGD, whose rates are larger, has trained none above it."""


class Bounds(NamedTuple):
    """From `least` to `most`, each in or out of what is allowed."""

    least: float
    most: float
    why: str
    has_least: bool = True
    has_most: bool = True

    def hold(self, value: float) -> bool:
        above = value >= self.least if self.has_least else value > self.least
        return above and (value <= self.most if self.has_most else value < self.most)

    def __str__(self) -> str:
        low = "from" if self.has_least else "above"
        high = "to" if self.has_most else "to below"
        return f"{low} {self.least:g} {high} {self.most:g}"


_DECAY = "an average of gradients that forgets none would grow without end"
RULES = {
    "learning_rate": Bounds(
        0, HIGHEST_LEARNING_RATE, "a step moves each weight by about as much with Adam"
    ),
    "weight_decay": Bounds(0, math.inf, "weights shrink by it", has_most=False),
    "max_grad_norm": Bounds(0, math.inf, "0 never clips", has_most=False),
    "adam_beta1": Bounds(0, 1, _DECAY, has_most=False),
    "adam_beta2": Bounds(0, 1, _DECAY, has_most=False),
    "adam_epsilon": Bounds(
        0, math.inf, "a weight without a gradient divides by it", has_least=False, has_most=False
    ),
}
"""The recipes' settings and transformers' arguments have the same names."""


def check_numbers(settings: Any) -> None:
    """Raise ValueError for the first of `number_problems`, and for a warm-up beyond the run."""
    if (problem := next(number_problems(settings), None)) is not None:
        raise ValueError(problem)
    warmup, steps = (getattr(settings, name, None) or 0 for name in ("warmup_steps", "max_steps"))
    if warmup > steps > 0:
        raise ValueError(
            f"warmup_steps={warmup} with max_steps={steps}: the learning rate would never reach "
            f"its peak. Give {steps} warm-up steps at most, or more steps."
        )


def number_problems(settings: Any, kind: type | None = None) -> Iterator[str]:
    """Yield which numbers of a dataclass are not finite or beyond their bounds, and that weight
    decay makes weights grow. `kind`: the class whose fields are looked at; None: all of them."""
    for field in dataclasses.fields(kind or settings):
        value = getattr(settings, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{field.name}={value}: it must be a finite number."
        bounds = RULES.get(field.name)
        if bounds is not None and value is not None and not bounds.hold(value):
            yield f"{field.name}={value}: a number {bounds} ({bounds.why}). Give one in this range."
    rate, decay = (getattr(settings, name, 0) or 0 for name in ("learning_rate", "weight_decay"))
    if rate * decay > 1:
        yield (
            f"learning_rate={rate} with weight_decay={decay}: a step multiplies each weight by "
            f"1 - {rate * decay:g}, so that its sign changes. Their product must not exceed 1."
        )


def parse_tokens(text: str, least: int = 2) -> int:
    """131072, 128K (times 1,024) or 1M (times 1,048,576) as a number. Raises ValueError."""
    match = re.fullmatch(_TOKENS, text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r}: write tokens as 131072, 128K or 1M.")
    number = Fraction(re.sub("[,_]", "", match[1])) * _UNITS.get(match[2].lower(), 1)
    if number.denominator != 1 or not least <= number <= MOST_TOKENS:
        raise ValueError(f"{text!r}: give a whole number of tokens, {least} to {MOST_TOKENS:,}.")
    return int(number)
