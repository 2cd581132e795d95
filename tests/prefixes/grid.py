"""Everything that rows which begin alike may meet, against the same rows apart in one process:
`make test-grid`."""

import pytest

from longctx_patch.families.family import CHUNKS
from tests.covering import covering_all_of_two
from tests.hf.tiny import SUPPORTED
from tests.prefixes.batches import BATCHES, stock
from tests.prefixes.cases import DEGREES, FAMILIES, PLACES, POLICIES, Case, Grid
from tests.prefixes.ranks import BOUNDS, WAYS, differences, model_of, run_on_ranks, sharing

CHAINED = ("qwen3_next", "kimi_linear", "bamba", "lfm2")
"""Families with a delta rule, a delta rule of Kimi's, a state space and short convolutions."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", [*FAMILIES, *CHAINED])
def test_rows_that_begin_alike(family: str) -> None:
    """Each kind of rows over each kind of degrees; any two other circumstances meet."""
    places, policies, dtypes = PLACES, POLICIES, list(BOUNDS)
    if family in CHAINED:
        # States don't go along stripes, which are usual where a part of attention is kept, and
        # float32 keeps few digits of the gradients of their decays.
        places = tuple(place for place in places if place.get("layout") != "striped")
        policies, dtypes = policies[:3], ["float64"]
    axes = (list(BATCHES), DEGREES, places, policies, list(WAYS), dtypes)
    grid, cases = Grid(), [Case(family, *case) for case in covering_all_of_two(*axes)]
    wrong = [x for case in cases for x in grid.wrong(case)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["log_probs", "loss"])
def test_every_family_is_exact_or_refused(way: str) -> None:
    wrong = []
    for number, family in enumerate(SUPPORTED):
        batch = BATCHES[("pair", "beginnings", "long branch")[number % 3]]
        config = sharing(**({"ring_degree": 2}, {"ulysses_degree": 2})[number % 2])
        model = model_of(family, "float64")
        if CHUNKS in SUPPORTED[family].features:
            with pytest.raises(RuntimeError, match="share_prefixes='always' with rows that begin"):
                run_on_ranks(model, batch, config, way)  # the error is a virtual rank's
            continue
        ranks = run_on_ranks(model, batch, config, way)
        found = differences(ranks, stock(model, batch), way, BOUNDS["float64"])
        wrong += [f"{family}: {what}" for what in found]
    assert not wrong, "\n".join(wrong)
