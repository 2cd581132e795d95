"""Images in whole rows: their embeddings are put in before the rows are cut.

The model itself embeds the whole rows on every rank alike, with the images in them, and the decoder
begins with this rank's tokens of what came out. So the gradient of an image's encoder is, on each
rank, the part that comes of its own tokens, as for every other weight.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from longctx_patch.data.whole_rows import READ, RowsPass

Arguments = dict[str, Any]

PIXELS = ("pixel_values", "pixel_values_videos")
GRIDS = ("image_grid_thw", "video_grid_thw")
_KINDS = "mm_token_type_ids"
ARGUMENTS = frozenset({*PIXELS, *GRIDS, _KINDS, "second_per_grid_ts"})
"""Arguments of a model that say what its images are."""
OF_SHARDS = (
    "images with a batch of SequenceShardCollator: they are put in before rows are cut. Pass whole "
    "rows, as the processor makes them, with labels."
)
_DOCUMENTS = READ - {"input_ids", "labels", "attention_mask"}
_MASK, _FEATURES = "visual_pos_masks", "deepstack_visual_embeds"


def has_images(given: Mapping[str, Any]) -> bool:
    return any(given.get(name) is not None for name in PIXELS)


def grids(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The sizes of all images, which ranks of a group have alike."""
    return tuple(None if given.get(g) is None else given[g].tolist() for g in GRIDS)


def check_images(given: Mapping[str, Any]) -> None:
    """Refuse rows with images whose positions can't be known."""
    if said := sorted(name for name in _DOCUMENTS if given.get(name) is not None):
        raise ValueError(
            f"{said[0]} with images: the model makes positions of images and tokens itself, of one "
            "document in each row. Leave it out, and pack no rows that have images."
        )
    kinds = given.get(_KINDS)
    if not isinstance(kinds, Tensor) or kinds.shape != given["input_ids"].shape:
        raise ValueError(
            f"images without {_KINDS} of the shape of input_ids: positions of images (M-RoPE) "
            "follow from it. Pass all that the processor returns (return_mm_token_type_ids=True)."
        )


def whole_inputs(model: Any, given: Mapping[str, Any], rows: RowsPass, length: int) -> Arguments:
    """`input_ids` `[B, length]` and `position_ids` `[3, B, length]` of rows that begin in the first
    column, for a batch `[B, L]` with images that is padded on either side."""
    ids, read = given["input_ids"], {name: given.get(name) for name in ARGUMENTS - {*PIXELS}}
    positions, _ = model.model.get_rope_index(
        ids, attention_mask=given.get("attention_mask"), **read
    )
    padded = {
        "input_ids": ids.new_zeros(len(ids), length),
        "position_ids": positions.new_zeros(3, len(ids), length),
    }
    for number, (start, stop) in enumerate(rows.spans):
        padded["input_ids"][number, : stop - start] = ids[number, start:stop]
        padded["position_ids"][:, number, : stop - start] = positions[:, number, start:stop]
    return padded


def own_tokens(whole: Arguments, held: Tensor) -> tuple[Arguments, Arguments]:
    """(a decoder's arguments of this rank's tokens, those of them that place images).

    Args:
        whole: of whole rows: `inputs_embeds` `[B, L, hidden]`, `position_ids` `[3, B, L]`, and in
            Qwen3-VL which tokens are of images, `[B, L]`, with what early layers add to them,
            `[tokens of images, hidden]` for each of these layers.
        held: which tokens this rank has, in its order.
    """
    own = {name: value for name, value in whole.items() if name not in (_MASK, _FEATURES)}
    own["inputs_embeds"] = own["inputs_embeds"].index_select(1, held)
    placed = {"position_ids": own.pop("position_ids").index_select(2, held)}
    is_image = whole.get(_MASK)
    if is_image is not None:
        numbers = (is_image.flatten().cumsum(0) - 1).view_as(is_image)
        placed[_MASK] = is_image.index_select(1, held)
        chosen = numbers.index_select(1, held)[placed[_MASK]]
        placed[_FEATURES] = [features.index_select(0, chosen) for features in whole[_FEATURES]]
    return own, placed
