"""Runs of the recipe whose models have a flaw."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from longctx_patch.recipes import finetune
from tests.health.flaw import Flaw


@contextmanager
def planted(place: str, *batches: int, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Within it the recipe's models have the flaw, where `when` says so."""
    build = finetune.build_model

    def with_flaw(*args: Any) -> Any:
        model = build(*args)
        if when():
            Flaw(model, place, set(batches))
        return model

    with patch.object(finetune, "build_model", with_flaw):
        yield
