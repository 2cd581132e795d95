"""Circumstances of rows that begin alike: how they begin, the family, how ranks share a row, where
its tokens lie, which plan and checkpoint policy run, and what is asked."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from longctx_patch import LongContextConfig
from tests.prefixes.batches import BATCHES, Wanted, stock, tokens_of_tree
from tests.prefixes.ranks import BOUNDS, WAYS, differences, model_of, run_on_ranks, sharing

FAMILIES = (
    *("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss"),
    *("deepseek_v3", "qwen3_moe"),
)
DEGREES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (4, 1), (2, 2))
"""Ranks of Ulysses and of the ring."""
PLACES: tuple[dict[str, Any], ...] = (
    {},
    {"layout": "contiguous", "plan": "distflash_balanced"},
    {"layout": "contiguous", "plan": "ring"},
    {"layout": "zigzag", "plan": "zigzag_direct"},
    {"layout": "zigzag", "plan": "zigzag", "backward_plan": "burst"},
    {"layout": "striped", "plan": "striped"},
    {"layout": "balanced", "plan": "ring", "backward_plan": "burst"},
    {"layout": "balanced", "plan": "halo"},
    {"layout": "zigzag", "plan": "allgather"},
)
POLICIES: tuple[dict[str, Any], ...] = (
    {"checkpoint": "none"},
    {"checkpoint": "full"},
    {"checkpoint": "attention"},
    {"checkpoint": "offload", "attention_kept": 0.4},
)


class Case(NamedTuple):
    family: str
    rows: str
    degrees: tuple[int, int]
    place: dict[str, Any]
    policy: dict[str, Any]
    way: str
    dtype: str

    @property
    def config(self) -> LongContextConfig:
        ulysses, ring = self.degrees
        loss = {"loss": "logits"} if self.way == "logits" else {}
        return sharing(
            ulysses_degree=ulysses, ring_degree=ring, **self.place, **self.policy, **loss
        )


def in_turn(values: Sequence[Any], number: int) -> Any:
    return values[number % len(values)]


SOME = [
    Case(
        in_turn(FAMILIES, number),
        rows,
        in_turn(DEGREES, number),
        in_turn(PLACES, number),
        in_turn(POLICIES, number),
        way,
        in_turn(list(BOUNDS), number),
    )
    for number, (rows, way) in enumerate(product(BATCHES, WAYS))
]
"""A case for each kind of rows and each thing that is asked."""


class Grid:
    """Compares cases; what rows apart give is computed once for each batch, family and type."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[str, ...], Wanted] = {}

    def wrong(self, case: Case) -> list[str]:
        """What differs in a case, in words; the number of tokens that were computed too."""
        batch, model = BATCHES[case.rows], model_of(case.family, case.dtype)
        about = (case.family, case.rows, case.dtype)
        if about not in self._wanted:
            self._wanted[about] = stock(model, batch)
        ranks = run_on_ranks(model, batch, case.config, case.way)
        found = differences(ranks, self._wanted[about], case.way, BOUNDS[case.dtype])
        tree = tokens_of_tree(batch, has_labels=case.way != "logits")
        tokens, multiple = (
            sum(rank.tokens for rank in ranks),
            case.config.padding_multiple(packed=True),
        )
        is_shared = tree < sum(map(len, batch.rows))
        if is_shared and not tree <= tokens < tree + multiple:
            found.append(f"{tokens} tokens for a tree of {tree}")
        return [f"{case}: {what}" for what in found]
