"""The survey of families finds what is exact, what differs and what can't run."""

import pytest
from survey_families import survey, tiny_config

from longctx_patch.hf.model.supported import FAMILIES


@pytest.mark.parametrize(
    ("model_type", "ring", "ulysses"),
    [
        ("gemma", "equal", "equal"),
        ("gpt2", "equal", "equal"),  # refused for another reason
        ("opt", "NOT equal", "NOT equal"),  # by gradients that are zero but for rounding
        ("doge", "fails", "fails"),
    ],
)
def test_verdicts(model_type: str, ring: str, ulysses: str) -> None:
    before = dict(FAMILIES)
    found = [verdict.split(":")[0].split(" within")[0] for verdict in survey(model_type).values()]
    assert found == [ring, ulysses]
    assert dict(FAMILIES) == before


def test_models_of_images_are_not_surveyed() -> None:
    assert "not a decoder of text alone" in survey("fuyu")["build"]


def test_tiny_configs_draw_nothing() -> None:
    config = tiny_config("gpt2")
    assert (config.resid_pdrop, config.attn_pdrop, config.summary_first_dropout) == (0.0, 0.0, 0.0)
