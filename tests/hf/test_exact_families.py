"""Every family: in float64 loss and gradients are those of the stock model.

Each runs under one of the ways to cut rows, padded or packed, and every checkpoint policy has some.
Those with recurrent layers or latent attention are in `test_states_and_latents.py`, and those that
read images in `test_images.py`.
"""

import pytest

from longctx_patch import LongContextConfig, patch
from longctx_patch.families.family import CHUNKS, LATENT, RECURRENT
from longctx_patch.hf.model.stock_model import MASKED_WITHOUT_POSITIONS
from tests.hf.float64 import WAYS, assert_exact, in_float64, packed_row, padded_rows
from tests.hf.tiny import SUPPORTED, featured_model

ATTENTIVE = [
    name for name, family in SUPPORTED.items() if not {LATENT, *RECURRENT} & {*family.features}
]
COUNTED_FROM_ROWS = [name for name, family in SUPPORTED.items() if CHUNKS in family.features]
"""Whose packed rows transformers reads otherwise (`test_chunked_attention.py`)."""


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_each_family_under_one_of_the_ways(number: int) -> None:
    config = LongContextConfig(**WAYS[number])
    for family in ATTENTIVE[number :: len(WAYS)]:
        is_packed = number % 2 and family not in (*MASKED_WITHOUT_POSITIONS, *COUNTED_FROM_ROWS)
        batch = packed_row() if is_packed else padded_rows()
        trained = assert_exact(in_float64(family), config, batch)
        assert trained == {
            name
            for name, parameter in featured_model(family).named_parameters()
            if parameter.requires_grad
        }


@pytest.mark.parametrize("number", [1, 3, 4, 5])
def test_layers_that_share_keys_or_differ_in_their_heads(number: int) -> None:
    batch = packed_row() if number % 2 else padded_rows()
    assert_exact(in_float64("gemma4_text"), LongContextConfig(**WAYS[number]), batch)


@pytest.mark.parametrize("family", MASKED_WITHOUT_POSITIONS)
def test_packed_rows_whose_documents_would_see_each_other_are_refused(family: str) -> None:
    with pytest.raises(RuntimeError, match="would let them see each other"):
        assert_exact(in_float64(family), LongContextConfig(ring_degree=2), packed_row())
    one, packed = in_float64(family), packed_row()
    patch(one, LongContextConfig())
    for mode in (one.train, one.eval):
        mode()
        with pytest.raises(ValueError, match="several documents in a row and transformers"):
            one(**packed)
    one.generate(packed["input_ids"], max_new_tokens=2, do_sample=False)
