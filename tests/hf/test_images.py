"""Rows with images over virtual ranks: the loss and every gradient, those of the image encoder too,
are those of the stock eager model in one process."""

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.families.checks import UnsupportedModelError
from longctx_patch.families.family import IMAGES, RECURRENT
from longctx_patch.families.supported import FAMILIES
from longctx_patch.hf.call.image_rows import spans_mask
from longctx_patch.sequence.masks import bidirectional
from longctx_patch.verification import verify
from longctx_patch.verification.shrink import keep_float64
from tests.hf.float64 import WAYS, backward, stock_loss
from tests.hf.seeing import WHOLE, seeing_config, seeing_model, seen_rows, text_rows
from tests.hf.steps import collated, on_ranks, step_of_ranks
from tests.reference import relative_error

SEEING = [name for name in WHOLE if name.split()[0] in FAMILIES]
ROW = ("input_ids", "labels", "attention_mask", "mm_token_type_ids")
"""What rows have beside their images."""
TWO = LongContextConfig(ring_degree=2)
ALONE = {"ring_degree": 1, "checkpoint": "attention"}


def of_images(name: str) -> bool:
    """Whether a weight belongs to what reads images."""
    parts = (".visual.", ".vision_tower.", ".multi_modal_projector.", ".embed_vision.")
    return any(part in name for part in parts)


def is_recurrent(family: str) -> bool:
    return bool(set(FAMILIES[family.split()[0]].features) & set(RECURRENT))


def assert_exact(
    family: str, config: LongContextConfig, batch: dict[str, Any]
) -> dict[str, Tensor]:
    """Compare virtual ranks with the stock model in float64; returns its loss and gradients."""
    model = seeing_model(family)
    keep_float64(model)
    batch = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
    found = step_of_ranks(model, config, batch)
    wanted = backward(stock_loss(model, batch), model)
    assert found.grads.keys() == wanted.keys() - {"loss"}
    for name, value in (found.grads | {"loss": found.loss}).items():
        error = relative_error(value, wanted[name])
        if name.endswith("k_proj.bias") and of_images(name):
            # It adds one number to all scores of a query, so that its gradient is rounding alone.
            scale = wanted[name.replace("bias", "weight")].norm()
            error = float((value - wanted[name]).norm() / scale)
        assert error < 1e-10, f"{family}, {config}: {name} differs by {error:.1e}"
    return wanted


KINDS = ("gemma3", "qwen3_5", "qwen3_vl")
"""Families whose images see each other, with recurrent layers, and whose images have features for
later layers too."""
TURNS = [
    (family, ways[(number + turn) % len(ways)])
    for ways in ([*WAYS, ALONE],)
    for number, family in enumerate(SEEING)
    for turn in ((0, 3) if family in KINDS else (0,))
]
"""Each family in one or two of the ways to cut rows, each way with some families."""


@pytest.mark.parametrize(("family", "way"), TURNS, ids=str)
def test_ranks_compute_what_one_process_does(family: str, way: dict[str, Any]) -> None:
    if is_recurrent(family) and "attention_kept" in way:
        way = way | {"layout": "zigzag"}  # a chain takes no stripes, which are usual there
    config = LongContextConfig(**way)
    wanted = assert_exact(family, config, seen_rows(family))
    model = seeing_model(family)
    assert wanted.keys() - {"loss"} == {name for name, _ in model.named_parameters()}
    visual = [value for name, value in wanted.items() if of_images(name)]
    assert len(visual) >= 10
    assert all(bool(value.any()) for value in visual), "images matter to the loss"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4"])
def test_videos_and_rows_without_images(family: str) -> None:
    """A video beside images; and rows of text alone, from which images' weights learn nothing."""
    config = LongContextConfig(ulysses_degree=2, ring_degree=2, checkpoint="attention")
    assert_exact(family, config, seen_rows(family, video=True))
    text = assert_exact(family, config, text_rows())
    assert not any(of_images(name) for name in text)


def images_of(outputs: Any) -> list[Tensor]:
    """What a model returns of its images: since transformers 5.24 `image_outputs`."""
    whole = outputs.get("image_outputs")
    pooled = outputs.get("image_hidden_states") if whole is None else whole.pooler_output
    assert pooled is not None or Version(transformers.__version__) < Version("5.24")
    return [] if pooled is None else list(pooled)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "mistral3"])
def test_evaluation_log_probs_and_what_is_restored(family: str) -> None:
    """Whole rows in evaluation on each rank alone, shared, and their log-probabilities; the model
    is the stock one again when it is unpatched."""
    batch, whole = seen_rows(family), seeing_model(family)
    alone = copy.deepcopy(whole).eval()
    given = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        logits = alone(**given).logits
        loss, images = stock_loss(alone, batch), images_of(alone(**batch))
    labels = batch["labels"][:, 1:]
    wanted = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    wanted = wanted * (labels >= 0)

    def evaluate(model: Any, handle: PatchHandle) -> None:
        found = handle.token_log_probs(batch)
        assert relative_error(found, wanted) < 1e-5
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(**given).logits, logits)
            with handle.sharing_evaluation():
                shared = model(**batch)
                assert relative_error(shared.loss, loss) < 1e-5
                assert len(images_of(shared)) == len(images)
                assert all(map(torch.equal, images_of(shared), images))
        handle.unpatch()
        with torch.no_grad():
            assert torch.equal(model(**given).logits, logits)
        assert model.config.text_config._attn_implementation == "eager"
        assert model.config.vision_config._attn_implementation == "eager"

    on_ranks(whole, TWO, evaluate)


def refusal(batch: dict[str, Any], others: dict[str, Any] | None = None) -> str:
    """What two ranks say of a batch, rank 1 of `others` if they are given."""
    family = "gemma3" if "token_type_ids" in batch else "qwen3_vl"

    def refuse(model: Any, handle: PatchHandle) -> str:
        mine = others if others is not None and handle.group_rank else batch
        with pytest.raises(ValueError) as raised:
            model(**mine)
        return str(raised.value)

    return str(on_ranks(seeing_model(family), TWO, refuse)[0])


def test_rows_whose_images_have_no_known_places_are_refused() -> None:
    rows = seen_rows("qwen3_vl")
    unknown = {name: value for name, value in rows.items() if name != "mm_token_type_ids"}
    assert "images without mm_token_type_ids" in refusal(unknown)
    unpadded = {name: value for name, value in rows.items() if name != "attention_mask"}
    unpadded["labels"] = torch.full_like(rows["labels"], 5)
    positions = torch.arange(47).expand(2, -1) % 25
    unpadded["labels"][:, 25] = -100
    assert "position_ids with images" in refusal(unpadded | {"position_ids": positions})
    unsized = {name: value for name, value in rows.items() if name != "image_grid_thw"}
    assert "pixel_values without image_grid_thw" in refusal(unsized)
    few = rows | {"mm_token_type_ids": rows["mm_token_type_ids"].clone()}
    few["mm_token_type_ids"][0, (few["mm_token_type_ids"][0] == 1).nonzero()[0]] = 0
    assert "13 tokens that stand for pixel_values and 14 features of image_grid_thw" in refusal(few)
    other = rows | {"image_grid_thw": rows["image_grid_thw"].clone()}
    other["image_grid_thw"][0] = torch.tensor((1, 6, 4))  # as many patches, in another shape
    said = refusal(rows, other)
    assert "with labels for loss, images ((56, 24), None, [[1, 4, 6], [1, 2, 4]" in said
    assert "with labels for loss\n" in refusal(rows, {n: rows[n] for n in ROW})
    for change in (rows["pixel_values"].flip(0), rows["pixel_values"] + 1e-6):
        said = refusal(rows, rows | {"pixel_values": change})
        sizes = r"images \(\(56, 24\), .*, checksum"
        here, there = re.findall(rf"{sizes} ([0-9a-f]{{16}})", said)
        assert here != there
        assert "must not depend on the rank or on a worker of its dataloader" in said


def test_a_batch_has_one_mask_of_images() -> None:
    rows = seen_rows("gemma3")
    rows["token_type_ids"][1, 25] = 1
    assert "2 rows with images in different places" in refusal(rows)

    def refuse(model: Any, _: PatchHandle) -> None:
        with pytest.raises(ValueError, match="Patch it without mask="):
            model(**seen_rows("gemma3"))

    on_ranks(seeing_model("gemma3"), TWO, refuse, mask=bidirectional)


def test_plans_made_ahead_without_the_images_mask_are_not_used() -> None:
    rows, whole = seen_rows("gemma3"), seeing_model("gemma3")
    wanted = stock_loss(whole, rows).detach()

    def train(model: Any, handle: PatchHandle) -> None:
        for batch in handle.plan_ahead([rows, rows]):
            assert relative_error(model(**batch).loss.detach(), wanted) < 1e-5

    on_ranks(whole, TWO, train)


def test_the_mask_of_images() -> None:
    table = np.tril(np.ones((19, 19), dtype=bool))
    for start, stop in ((3, 8), (8, 9), (17, 19)):
        table[start:stop, start:stop] = True
    assert np.array_equal(spans_mask(19, ((3, 8), (8, 9), (17, 19))).dense(), table)
    assert np.array_equal(spans_mask(5, ((0, 5),)).dense(), np.ones((5, 5), dtype=bool))


def test_images_of_a_shard_are_refused() -> None:
    model, rows = seeing_model("qwen2_5_vl"), seen_rows("qwen2_5_vl")
    handle = patch(model, LongContextConfig())
    shard = collated(handle, [{"input_ids": row} for row in rows["input_ids"].tolist()])
    with pytest.raises(ValueError, match="Pass whole rows, as the processor makes them"):
        model(**shard, **{name: rows[name] for name in ("pixel_values", "image_grid_thw")})


def test_other_models_that_read_images_are_refused_with_the_fix() -> None:
    seeing = {name for name, family in FAMILIES.items() if IMAGES in family.features}
    assert seeing == {name.split()[0] for name in SEEING}
    for family in set(WHOLE) - set(SEEING):
        with pytest.raises(UnsupportedModelError, match=r"longctx_patch\.plugin\.text_model"):
            patch(seeing_model(family), LongContextConfig())
    with pytest.raises(ValueError, match="its text model is verified"):
        verify(seeing_config("qwen3_vl"), [LongContextConfig(ring_degree=2)])


def test_sizes_of_images_may_be_a_list() -> None:
    rows = seen_rows("mistral3")
    given = rows | {"image_sizes": [tuple(size) for size in rows["image_sizes"].tolist()]}
    model = seeing_model("mistral3")
    wanted = stock_loss(model, rows).detach()
    assert relative_error(step_of_ranks(model, TWO, given).loss, wanted) < 1e-5
