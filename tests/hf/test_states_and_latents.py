"""Recurrent layers and latent attention over ranks in every pair of circumstances: how a row is
cut, where its tokens lie, which plan and checkpoint policy run, what travels, and whether rows are
plain, packed or padded.

Loss, logits and every gradient are those of the stock eager model, of which each document runs by
itself, in float64.
"""

import copy
from typing import Any

import pytest

from longctx_patch import LongContextConfig, PatchHandle
from longctx_patch.families.family import CONVOLUTION, LATENT, RECURRENT
from tests.covering import covering_all_of_two
from tests.hf.float64 import documents_padded, in_float64, stock_step, whole_row
from tests.hf.steps import Step, complaints, step_of_ranks
from tests.hf.tiny import SUPPORTED

CHAINED = [name for name, family in SUPPORTED.items() if set(family.features) & set(RECURRENT)]
LATENTS = [name for name, family in SUPPORTED.items() if LATENT in family.features]
ATTENTIVE = [name for name in LATENTS if name not in CHAINED]

DEGREES = ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (4, 1))
"""Ranks of Ulysses and of the ring."""
PLACES = (
    ("contiguous", "auto"),
    ("contiguous", "distflash_balanced"),
    ("zigzag", "auto"),
    ("balanced", "auto"),
)
POLICIES: tuple[dict[str, Any], ...] = (
    {"checkpoint": "none"},
    {"checkpoint": "full"},
    {"checkpoint": "attention"},
    {"checkpoint": "offload", "attention_kept": 0.4},
)
"""`auto` is `attention` on the CPU, where no meter counts the memory."""
ROWS = {
    "plain": (29,),
    "packed": (1, 2, 11, 3, 1, 11),
    "padded": (17, 12),
}
"""Lengths of documents: some are shorter than the reach of a convolution, long ones go over the
edges of shards."""
TRAVELS = ("auto", "heads")
"""States or heads of a recurrent layer; latents or heads of latent attention."""


def cases_of(families: list[str], places: tuple[tuple[str, str], ...]) -> list[tuple[Any, ...]]:
    """Pairs of circumstances over one family of each kind, then each other family once."""
    kinds = {kind_of(family): family for family in reversed(families)}
    axes = covering_all_of_two(DEGREES, POLICIES, list(kinds.values()), places, list(ROWS), TRAVELS)
    cases = [
        (family, degrees, place, policy, rows, what)
        for degrees, policy, family, place, rows, what in axes
    ]
    others = [family for family in families if family not in kinds.values()]
    return cases + [(family, *cases[number][1:]) for number, family in enumerate(others)]


def kind_of(family: str) -> frozenset[str]:
    return frozenset({LATENT, *RECURRENT} & {*SUPPORTED[family].features})


CASES = cases_of(ATTENTIVE, (*PLACES, ("striped", "auto"))) + cases_of(CHAINED, PLACES)
FAMILIES = {family: [case[1:] for case in CASES if case[0] == family] for family, *_ in CASES}


def config_of(
    family: str, degrees: tuple[int, int], place: tuple[str, str], policy: dict[str, Any], what: str
) -> LongContextConfig:
    ulysses, ring = degrees
    options: dict[str, Any] = {"layout": place[0], "plan": place[1], "loss": "logits"} | policy
    if what == "heads" and family in LATENTS:
        options["kv_exchange"] = "heads"
    if place == ("zigzag", "auto") and family in ATTENTIVE:
        options["backward_plan"] = "burst"
    has_recurrence = family in CHAINED and CONVOLUTION not in SUPPORTED[family].features
    if what == "heads" and has_recurrence and ulysses > 1:
        options["recurrent_exchange"] = "heads"
    return LongContextConfig(ulysses_degree=ulysses, ring_degree=ring, **options)


def says_what_travels(handle: PatchHandle) -> None:
    """Latents travel in a ring without Ulysses, unless heads are asked for."""
    config = handle.config
    latents = config.ulysses_degree == 1 < config.ring_degree and config.kv_exchange != "heads"
    is_latent = handle.model.config.model_type in LATENTS
    assert ("latents travel" in repr(handle.first_step)) == (latents and is_latent)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_circumstances_is_exact(family: str) -> None:
    model = in_float64(family)
    wanted: dict[str, Step] = {}
    for degrees, place, policy, rows, what in FAMILIES[family]:
        lengths = ROWS[rows]
        if rows not in wanted:
            wanted[rows] = stock_step(copy.deepcopy(model), lengths)
        config = config_of(family, degrees, place, policy, what)
        batch = documents_padded(lengths) if rows == "padded" else whole_row(lengths)
        step = step_of_ranks(model, config, batch, says_what_travels)
        assert step.logits is not None
        if rows == "padded":
            step = step._replace(logits=step.logits[batch["attention_mask"].bool()][None])
        assert wanted[rows].logits is not None
        assert not complaints(step, wanted[rows], (rows, config), bound=1e-10)
