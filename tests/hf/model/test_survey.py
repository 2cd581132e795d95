"""What the survey of families ran is what the table of support says."""

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from longctx_patch.hf.model.supported import FAMILIES, TABLE
from longctx_patch.hf.model.survey import errors, found, survey, surveyed_version

FLOAT64, FLOAT32 = 1e-10, 1e-5
ROUNDS_MORE = {"apertus": 2.2, "apertus1p5_text": 2.2}
"""Apertus and the text model of Apertus 1.5, which are one code. Their largest error is that of one
number, an alpha of the activation, whose gradient is a sum over all tokens that nearly cancels. Its
rounding is chance: over eight draws of weights stock eager has 1e-6 to 2.4e-5, stock sdpa 0.9 to
2.6 times as much, and one rank or a ring 0.3 to 3.3 times. In float64 they are equal."""
REFUSED = [family for family in TABLE if family.refusal is not None]
EQUAL_BUT_REFUSED = (
    "learned positions end at the pretrained length",
    "reads images or sound",
    "reads images too",
    "with images its model is not compared",
    "each layer has two attentions",
    "attention registry since 5.24 alone",
)
"""Reasons why a family is refused though a step of text equals that of its stock self."""


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_ran_and_were_equal(family: str) -> None:
    verdicts = survey()[family]
    assert verdicts.keys() == {"ring", "Ulysses"}
    for verdict in verdicts.values():
        assert verdict["float64"] <= FLOAT64
        bound = ROUNDS_MORE.get(family, 2) * verdict["stock float32"]
        assert verdict["float32"] <= max(FLOAT32, bound)


def test_refused_families_ran_and_were_not_equal_or_have_another_reason() -> None:
    for family in REFUSED:
        assert family.refusal is not None
        assert family.model_type in survey(), f"{family.model_type}: run the survey with --write"
        is_equal = errors(family.model_type) is not None
        reasoned = any(reason in family.refusal for reason in EQUAL_BUT_REFUSED)
        assert reasoned or not is_equal, f"{family.model_type}: {found(family.model_type)}"


@pytest.mark.skipif(
    Version(transformers.__version__).release[:2] != Version(surveyed_version()).release[:2],
    reason="the survey is of another version",
)
def test_every_decoder_of_text_or_of_text_and_images_has_a_row() -> None:
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert known <= {family.model_type for family in TABLE}
    assert survey().keys() <= known
    assert {family.model_type for family in TABLE} <= survey().keys()
