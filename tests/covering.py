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
