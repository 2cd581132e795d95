"""Every rank refuses documents beyond what a model's RoPE reaches, unless that is allowed by name,
ids and labels beyond its vocabulary, and a cache by either name, before a kernel meets them."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.hf.call.inputs import check_whole_rows, input_problem
from longctx_patch.hf.call.stock_documents import check_one_document
from longctx_patch.hf.model.transformers_api import CACHE_NAMES, cache_name
from tests.hf.call.test_mixers import DOCUMENTS, LENGTH, THOROUGH, TOLERANCE
from tests.hf.float64 import in_float64, stock_step, whole_row
from tests.hf.steps import collated, on_ranks
from tests.hf.tiny import VOCABULARY, featured_model, tiny_model, token_rows
from tests.reference import relative_error

REACH = 24
TWO = LongContextConfig(ring_degree=2)
BEYOND = r"25 tokens, but the model reaches 24 .*scale_rope.*target_length=25.*allow_beyond_reach"


def whole_rows(length: int, documents: tuple[int, ...] = ()) -> dict[str, Any]:
    ids = torch.tensor([row["input_ids"] for row in token_rows(length, num_rows=1)])
    places = torch.cat([torch.arange(size) for size in documents or (length,)])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(places == 0, -100), "position_ids": places}


def test_all_ranks_refuse_the_first_row_that_is_too_long() -> None:
    """As whole rows and as shards; packed documents count by their own lengths."""

    def train(model: Any, handle: PatchHandle) -> list[float]:
        reached = [
            model(**whole_rows(REACH)).loss,
            model(**whole_rows(2 * REACH, (REACH, REACH))).loss,
        ]
        with pytest.raises(ValueError, match=BEYOND):
            model(**whole_rows(REACH + 1))
        with pytest.raises(ValueError, match=BEYOND):
            model(**collated(handle, [*token_rows(REACH - 1), *token_rows(REACH + 1)]))
        return [loss.item() for loss in reached]

    assert all(map(all, on_ranks(tiny_model(max_position_embeddings=REACH), TWO, train)))


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_one_rank_refuses_rows_of_any_form(name: str) -> None:
    """Rows with a mask of their own take the stock path."""
    model = tiny_model(max_position_embeddings=REACH)
    handle = patch(model, LongContextConfig())
    batch = whole_rows(REACH + 1)
    mask = torch.ones(1, 1, REACH + 1, REACH + 1, dtype=torch.bool).tril()
    del batch["position_ids"]
    given = batch if name == "position_ids" else batch | {name: mask}
    with pytest.raises(ValueError, match=BEYOND):
        model(**given)
    handle.unpatch()
    stock = model(**given).loss
    patch(model, replace(handle.config, allow_beyond_reach=True))
    torch.testing.assert_close(model(**given).loss, stock)


ROWS = {
    "masked": {"input_ids": [1, 2, 3, VOCABULARY], "labels": [1, 2, -100, -100]},
    "first": {"input_ids": [2**40, 2, 3, 4], "labels": [-100] * 4},
    "label": {"input_ids": [1, 2, 3, 4], "labels": [1, 2, VOCABULARY, 4]},
}


@pytest.mark.parametrize("name", ROWS)
def test_every_rank_refuses_what_one_of_them_has(name: str) -> None:
    """Only one rank has the token: the other would have waited for it."""
    config = LongContextConfig(ring_degree=2, layout="contiguous")

    def refuse(model: Any, handle: PatchHandle) -> str:
        with pytest.raises(ValueError, match="tokenizer against the model's vocab_size") as raised:
            model(**collated(handle, [ROWS[name]]))
        return str(raised.value)

    largest = max(ROWS[name]["input_ids"])
    wanted = f"input_ids from 0 to {largest}" if name != "label" else f"label {VOCABULARY}: labels"
    for said in on_ranks(tiny_model(), config, refuse):
        assert wanted in said


def test_the_last_id_is_one() -> None:
    model = tiny_model()
    handle, last = patch(model, LongContextConfig()), VOCABULARY - 1
    assert torch.isfinite(model(**collated(handle, [{"input_ids": [last, 0, last]}])).loss)


IDS = torch.arange(1, 12)[None]


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_refused_where_rows_are_shared(name: str) -> None:
    positions = torch.arange(IDS.shape[1])[None]
    said = input_problem({name: DynamicCache()}, positions, wants_router_logits=False)
    assert said is not None
    assert said.startswith(f"{name} with a sharded batch: a cache holds one rank's keys only")
    assert input_problem({name: None}, positions, wants_router_logits=False) is None
    model, config = featured_model("llama"), LongContextConfig(ring_degree=2)

    def run(mine: Any, handle: PatchHandle) -> None:
        with pytest.raises(ValueError, match=rf"^{name} in training: a cache holds one rank's"):
            mine(input_ids=IDS, labels=IDS, **{name: DynamicCache()})
        late: dict[str, Any] = {"position_ids": positions + 7, "use_cache": True}
        with pytest.raises(ValueError, match=r"position_ids start \[7, 8, 9, 10\]"):
            check_whole_rows(handle.group, late)
        check_whole_rows(handle.group, late | {name: DynamicCache()})
        mine.eval()
        with handle.sharing_evaluation(), torch.no_grad():  # a token after those of a cache
            past = mine(input_ids=IDS[:, :5], use_cache=True).past_key_values
            found = mine(input_ids=IDS[:, 5:], labels=IDS[:, 5:], **{taken(mine, name): past})
            assert torch.equal(found.logits, expected)

    def taken(mine: Any, name: str) -> str:
        """The name, where this version of transformers knows it."""
        return name if name == CACHE_NAMES[1] else cache_name(mine)

    with torch.no_grad():
        stock = copy.deepcopy(model).eval()
        past = stock(input_ids=IDS[:, :5], use_cache=True).past_key_values
        expected = stock(input_ids=IDS[:, 5:], past_key_values=past).logits
    on_ranks(model, config, run)


class KeepsOne(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, past_key_values: Any = None) -> Any:
        cache = past_key_values
        return hidden if cache is None else cache


def test_a_local_variable_is_no_argument() -> None:
    assert cache_name(KeepsOne()) == "past_key_values"


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
