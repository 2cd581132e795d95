"""A function of another module, run with other functions in place of those that it calls."""

from collections.abc import Mapping
from types import FunctionType
from typing import Any


def with_names(function: FunctionType, meanings: Mapping[str, Any]) -> FunctionType:
    """A copy of a function, for which names of its module mean something else."""
    made = FunctionType(
        function.__code__,
        function.__globals__ | dict(meanings),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
