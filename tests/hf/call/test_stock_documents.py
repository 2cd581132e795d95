"""Whole rows on the stock path of models with recurrent layers.

Packed rows in evaluation, and on one rank those with an attention mask, ran as one document there:
the loss differed from that of the documents by themselves, silently.
"""

import copy
from typing import Any

import pytest
import torch

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.hf.call.stock_documents import check_one_document
from tests.hf.call.test_mixers import DOCUMENTS, LENGTH, THOROUGH, TOLERANCE
from tests.hf.float64 import in_float64, stock_step, whole_row
from tests.hf.steps import on_ranks
from tests.hf.tiny import featured_model
from tests.reference import relative_error

REFUSED = "position_ids go from 0 to 0 at column 1 of row 0: several documents in a row"
PADDED = torch.tensor([[0] * 3 + [1] * 4, [1] * 7])


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("family", THOROUGH)
def test_documents_are_kept_apart_or_refused(family: str, degree: int) -> None:
    model, packed, plain = in_float64(family), whole_row(DOCUMENTS), whole_row((LENGTH,))
    wanted = stock_step(copy.deepcopy(model), DOCUMENTS).loss
    alone = copy.deepcopy(model).eval()(**plain).loss
    words = generated(copy.deepcopy(model).eval())
    one_mask = {"attention_mask": torch.ones_like(packed["input_ids"])}

    def run(model: Any, handle: PatchHandle) -> None:
        assert relative_error(model(**packed).loss, wanted) < TOLERANCE
        if degree == 1:
            with pytest.raises(ValueError, match=REFUSED):
                model(**packed, **one_mask)
        decoder, ids, positions = model.get_decoder(), packed["input_ids"], packed["position_ids"]
        model.eval()
        with torch.no_grad():
            for further in ({}, {"use_cache": False}, one_mask):
                with pytest.raises(ValueError, match=REFUSED):
                    model(**packed, **further)
            with pytest.raises(ValueError, match=REFUSED):
                decoder(input_ids=ids, position_ids=positions)
            with handle.sharing_evaluation():
                assert relative_error(model(**packed).loss, wanted) < TOLERANCE
            assert torch.equal(model(**plain).loss, alone)
            assert all(map(torch.equal, generated(model), words))

    with pytest.warns(UserWarning, match="packed rows: documents begin anew in the recurrent"):
        on_ranks(model, LongContextConfig(ring_degree=degree), run)


def generated(model: Any) -> list[torch.Tensor]:
    """What a model writes after plain and after left-padded words, with a cache of either kind."""
    ids = torch.stack([whole_row((LENGTH,))["input_ids"][0, :7]] * 2)
    options = {"max_new_tokens": 4, "do_sample": False}
    given: tuple[dict[str, Any], ...] = ({}, {"attention_mask": PADDED}, {"use_cache": False})
    return [model.generate(ids, **options, **further) for further in given]


def test_what_says_documents() -> None:
    """Padding on either side is none, and neither is a token that goes on from a cache."""
    left = torch.tensor([[0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    several: list[tuple[str, dict[str, Any]]] = [
        ("position_ids go from 0 to 0 at column 1 of row 0", {"position_ids": left}),
        (
            "position_ids go from 1 to 0 at column 5 of row 0",
            {
                "position_ids": torch.tensor([[0, 0, 0, 0, 1, 0, 1]]),
                "attention_mask": {"full_attention": None, "linear_attention": PADDED[:1]},
            },
        ),
        (
            "position_ids go from 2 to 0 at column 3 of row 0",
            {"position_ids": torch.tensor([0, 1, 2, 0, 1]).expand(4, 1, 5)},
        ),
        (
            "position_ids go from 3 to 0 at column 4 of row 0",
            {"position_ids": torch.tensor([[[0, 1, 1, 3, 0, 1]]]).expand(3, 1, 6)},
        ),
        ("seq_idx with 2 documents", {"seq_idx": torch.tensor([[0, 0, 1]])}),
        ("cu_seq_lens_q with 3 edges", {"cu_seq_lens_q": torch.tensor([0, 2, 3])}),
        ("seq_lengths with a row of 2 documents", {"seq_lengths": [[3], [2, 1]]}),
    ]
    for said, kwargs in several:
        with pytest.raises(ValueError, match=f"{said}: several documents"):
            check_one_document(kwargs)
    for kwargs in (
        {},
        {"position_ids": left, "attention_mask": PADDED},
        {"position_ids": left, "attention_mask": {"linear_attention": PADDED}},
        # Four tokens of a picture, of two rows, between those of text.
        {"position_ids": torch.tensor([[[0, 1, 1, 1, 1, 3]], [[0, 1, 1, 2, 2, 3]]])[[0, 1, 1]]},
        {"position_ids": torch.tensor([[9], [4]]), "attention_mask": PADDED},
        {"position_ids": torch.tensor([[7, 8, 9]]), "attention_mask": torch.ones(1, 10)},
        {"seq_idx": torch.zeros(1, 3), "cu_seq_lens_q": [0, 3], "seq_lengths": [[3]]},
    ):
        check_one_document(kwargs)


def test_attention_alone_is_left_to_transformers() -> None:
    """It keeps documents apart by their positions, where there is no cache."""
    model, packed = featured_model("llama").eval(), whole_row(DOCUMENTS)
    wanted = model(**packed, use_cache=False).loss
    patch(model, LongContextConfig())
    assert torch.equal(model(**packed, use_cache=False).loss, wanted)
