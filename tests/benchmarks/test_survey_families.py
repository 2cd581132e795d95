"""The survey of families finds what is exact, what differs and what can't run."""

import pytest
from survey_families import in_words, survey, tiny_config

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


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("longctx_call", "a layer is called without 'longctx_call'"),
        (140108635290000, "a module that the patch does not know computes attention"),
    ],
)
def test_a_missing_key_is_a_sentence(key: object, said: str) -> None:
    error = RuntimeError(f"virtual rank 1 failed: {key}")
    error.__cause__ = KeyError(key)
    assert in_words(error) == said


def test_tiny_configs_draw_nothing() -> None:
    config = tiny_config("gpt2")
    assert (config.resid_pdrop, config.attn_pdrop, config.summary_first_dropout) == (0.0, 0.0, 0.0)
