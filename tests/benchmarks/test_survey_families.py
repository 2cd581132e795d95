"""The survey of families finds what is exact, what differs and what can't run."""

import pytest
from survey_families import survey, tiny_config

from longctx_patch.hf.model.supported import FAMILIES


@pytest.mark.parametrize(
    ("model_type", "verdict"),
    [
        ("gemma", "float64"),
        ("opt", "float64"),  # refused for another reason
        ("xmod", "differs"),
        ("doge", "fails"),
    ],
)
def test_verdicts(model_type: str, verdict: str) -> None:
    before = dict(FAMILIES)
    found = survey(model_type)
    assert list(found) == ["ring", "Ulysses"]
    assert all(verdict in way for way in found.values())
    assert dict(FAMILIES) == before


def test_what_fails_by_itself_is_told_apart() -> None:
    assert list(survey("gemma3n")) == ["stock"]  # its images need a package of their own


def test_tiny_configs_draw_nothing() -> None:
    config = tiny_config("gpt2")
    assert (config.resid_pdrop, config.attn_pdrop, config.summary_first_dropout) == (0.0, 0.0, 0.0)
