"""Ranks that are given other rows, or told other things, refuse them together: what rows share is
the same on all ranks of a group, or nothing is computed."""

from collections.abc import Callable
from typing import Any

import pytest

from longctx_patch import LongContextConfig, PatchHandle, patch
from tests.harness import run_distributed
from tests.hf.seeing import pictured_rows, seeing_model, seen_together
from tests.hf.steps import on_ranks
from tests.hf.tiny import featured_model
from tests.prefixes.batches import BATCHES, IGNORED, Shared, apart, weighted
from tests.prefixes.ranks import sharing
from tests.reference import relative_error

Given = dict[str, Any]
PAIR, TREE = BATCHES["pair"], BATCHES["tree"]


def with_values(name: str, *changes: tuple[int, int, int]) -> Given:
    """The pair with other values at (row, column)."""
    tensor = PAIR.given[name].clone()
    for row, column, value in changes:
        tensor[row, column] = value
    return PAIR.given | {name: tensor}


def rows_of(batch: Shared, *numbers: int) -> Given:
    return {name: value[list(numbers)] for name, value in batch.given.items()}


def learned(row: int) -> Given:
    """The pair with a label of a token that both rows have, in one of them."""
    return with_values("labels", (row, 10, int(PAIR.given["input_ids"][row, 10])))


OTHER_ROWS: dict[str, tuple[Given, Given]] = {
    "an id of the beginning": (
        PAIR.given,
        with_values("input_ids", (0, 4, 77), (1, 4, 77)),
    ),
    "an id of the beginning, in one row": (PAIR.given, with_values("input_ids", (1, 4, 77))),
    "the last id that is shared": (PAIR.given, with_values("input_ids", (0, 22, 77))),
    "an id of a branch": (PAIR.given, with_values("input_ids", (1, 30, 77))),
    "a label": (PAIR.given, with_values("labels", (0, 25, IGNORED))),
    "a label's word": (PAIR.given, with_values("labels", (0, 25, 5))),
    "which row has a label": (learned(0), learned(1)),
    "the order of rows": (TREE.given, rows_of(TREE, 2, 3, 0, 1)),
    "the order of branches": (PAIR.given, rows_of(PAIR, 1, 0)),
    "how many rows are equal": (rows_of(PAIR, 0, 0, 1), rows_of(PAIR, 0, 1, 1)),
    "the number of rows": (TREE.given, rows_of(TREE, 0, 1, 2)),
    "rows that begin alike elsewhere": (PAIR.given, TREE.given),
    "rows with nothing in common": (PAIR.given, BATCHES["nothing"].given),
}
"""What rank 0 has, and what rank 1 has."""
SAYS = "must hold shards of the same batch"


def said_of(ask: Callable[[Given], Any], given: Given) -> str:
    """The error, or nothing."""
    try:
        ask(given)
    except ValueError as error:
        return str(error)
    return ""


def check_other_rows(rank: int) -> None:
    """None waits for the other, and the next step is right."""
    model = featured_model("llama")
    handle = patch(model, sharing(ring_degree=2))
    asked: tuple[Callable[[Given], Any], ...] = (
        handle.token_log_probs,
        lambda given: model(**given),
    )
    said = {
        (name, number): said_of(ask, given[rank])
        for name, given in OTHER_ROWS.items()
        for number, ask in enumerate(asked)
    }
    assert not [name for name, text in said.items() if SAYS not in text]
    hole = with_values("attention_mask", (0, 3, 0))
    with pytest.raises(ValueError, match="hole" if rank else "rank 1 of the group refused"):
        handle.token_log_probs(hole if rank else PAIR.given)
    found = handle.token_log_probs(PAIR.given)
    wanted, _ = apart(featured_model("llama"), PAIR)
    assert relative_error(found, wanted) < 1e-5
    weighted(found, PAIR).backward()


def test_ranks_that_are_given_other_rows() -> None:
    run_distributed(check_other_rows, 2)


@pytest.mark.parametrize("value", ["sometimes", "", True, None, 1])
def test_values_that_do_not_exist(value: Any) -> None:
    with pytest.raises(ValueError, match=r"share_prefixes=.*always"):
        LongContextConfig(share_prefixes=value)


def test_rows_that_differ_in_their_images_alone() -> None:
    (row,) = pictured_rows("gemma3", 1, seed=0)
    other = row | {"pixels": [picture.flip(-1) for picture in row["pixels"]]}
    given = seen_together("gemma3", [row, other])

    def run(model: Any, _: PatchHandle) -> None:
        with pytest.raises(ValueError, match=r"share_prefixes='always'.* they have images"):
            model(**given)

    on_ranks(seeing_model("gemma3"), sharing(ring_degree=2), run)
