"""Pairwise coverage of a large grid: every pair of values of two axes occurs in some case."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def covering(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations (one value of each axis) in which any two values of two axes meet.

    Each next combination is the one that adds most pairs, the first such in the grid's order.
    """
    grid = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in grid}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(grid, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(tuple(axis[index] for axis, index in zip(axes, best, strict=True)))
    return chosen


def covering_all_of_two(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The same with a case for each combination of the first two axes, so that a long grid takes
    less time: for each, the values of the other axes are those that add most pairs."""
    numbers = [range(len(axis)) for axis in axes]
    missing = {
        tuple(zip(pair, values, strict=True))
        for pair in combinations(range(len(axes)), 2)
        for values in product(*(numbers[axis] for axis in pair))
    }
    chosen: list[tuple[int, ...]] = []

    def choose(*fixed: Sequence[int]) -> None:
        nonlocal missing
        best = max(product(*fixed), key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        chosen.append(best)

    for one, other in product(*numbers[:2]):
        choose([one], [other], *numbers[2:])
    while missing:
        values = dict(min(missing))
        choose(*([values[axis]] if axis in values else n for axis, n in enumerate(numbers)))
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in chosen]


def _pairs(case: tuple[int, ...]) -> set[Any]:
    return set(combinations(enumerate(case), 2))
