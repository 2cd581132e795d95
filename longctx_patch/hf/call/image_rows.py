"""Images in whole rows: their embeddings are put in before the rows are cut.

The model itself embeds the whole rows on every rank alike, with the images in them, and the decoder
begins with this rank's tokens of what came out. So the gradient of an image's encoder is, on each
rank, the part that comes of its own tokens, as for every other weight.
"""

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from longctx_patch.data.whole_rows import READ, RowsPass
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.masks import Mask, mask_of
from longctx_patch.sequence.regions import CAUSAL, FULL, Piece

Arguments = dict[str, Any]

PIXELS = ("pixel_values", "pixel_values_videos")
GRIDS = ("image_grid_thw", "video_grid_thw")
SIZES = (*GRIDS, "image_sizes")
"""What the images' sizes are called; the last is Mistral 3's."""
KINDS = ("mm_token_type_ids", "token_type_ids")
"""What each token is: 1 of an image. The second is Gemma 3's."""
PLACING = (*GRIDS, KINDS[0], "second_per_grid_ts")
"""Arguments of a model from which it makes positions of three rows."""
PATCHES = ("image_position_ids", "video_position_ids", "num_frames_per_video")
"""Where the patches of images are, and how many frames videos have: Gemma 4's."""
ARGUMENTS = frozenset({*PIXELS, *SIZES, *KINDS, *PLACING, *PATCHES})
"""Arguments of a model that say what its images are."""
OF_SHARDS = (
    "images with a batch of SequenceShardCollator: they are put in before rows are cut. Pass whole "
    "rows, as the processor makes them, with labels."
)
_DOCUMENTS = READ - {"input_ids", "labels", "attention_mask"}
_AS_WHOLE = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""Whole numbers by their bytes."""
_MASK, _FEATURES = "visual_pos_masks", "deepstack_visual_embeds"
_CUT = ("inputs_embeds", "per_layer_inputs")
"""A decoder's arguments of tokens: `[B, L, ...]`."""


def has_images(given: Mapping[str, Any]) -> bool:
    return any(given.get(name) is not None for name in PIXELS)


def grids(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The sizes of all images, which ranks of a group have alike."""
    pixels = (given.get(name) for name in PIXELS)
    shapes = [None if pixel is None else tuple(pixel.shape) for pixel in pixels]
    sizes = (given.get(name) for name in SIZES)
    return *shapes, *(size.tolist() if isinstance(size, Tensor) else size for size in sizes)


def checksum(given: Mapping[str, Any]) -> int:
    """63 bits that tell pixels apart; waits for the device, as the sizes of images do."""
    total = 0
    for name in PIXELS:
        if (pixels := given.get(name)) is not None:
            bits = pixels.detach().contiguous().view(_AS_WHOLE[pixels.element_size()])
            by_row = bits.reshape(len(bits), -1).sum(1, dtype=torch.int64)
            places = torch.arange(1, len(bits) + 1, device=bits.device)
            total = 31 * total + int((by_row * places).sum())
    return total & (2**63 - 1)


def places_by_grid(model: Any) -> bool:
    """Says whether the model gives images positions of three rows (M-RoPE)."""
    return hasattr(model.model, "get_rope_index")


def sees_both_ways(model: Any) -> bool:
    """Says whether the tokens of an image see each other in both directions, as in Gemma 3 and the
    larger Gemma 4; else they are causal, as those of text are."""
    text = model.config.get_text_config()
    option = getattr(text, "use_bidirectional_attention", None)
    return model.config.model_type == "gemma3" or option == "vision"


def kinds_of(model: Any) -> str | None:
    """The argument that says which tokens are of images, where the model has to know it."""
    if not places_by_grid(model) and not sees_both_ways(model):
        return None
    return KINDS[1] if model.config.model_type == "gemma3" else KINDS[0]


def check_images(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse rows with images whose positions, or whose mask, can't be known."""
    if said := sorted(name for name in _DOCUMENTS if given.get(name) is not None):
        raise ValueError(
            f"{said[0]} with images: the model makes positions of images and tokens itself, of one "
            "document in each row. Leave it out, and pack no rows that have images."
        )
    name = kinds_of(model)
    if name is None:
        return
    kinds = given.get(name)
    if not isinstance(kinds, Tensor) or kinds.shape != given["input_ids"].shape:
        raise ValueError(
            f"images without {name} of the shape of input_ids: positions of images, or who sees "
            f"them, follow from it. Pass all that the processor returns (return_{name}=True)."
        )
    if places_by_grid(model):
        for kind, (pixels, grid) in enumerate(zip(PIXELS, GRIDS, strict=True), start=1):
            _check_places(model, int((kinds == kind).sum()), given, pixels, grid)


def _check_places(
    model: Any, num_tokens: int, given: Mapping[str, Any], pixels: str, grid: str
) -> None:
    """Refuse images, or videos, that don't fit the tokens which stand for them."""
    sizes = given.get(grid)
    if given.get(pixels) is not None and sizes is None:
        raise ValueError(
            f"{pixels} without {grid}: positions follow from it. Pass all that the processor "
            "returns."
        )
    merged = model.config.vision_config.spatial_merge_size**2
    num_features = 0 if sizes is None else int(torch.as_tensor(sizes).prod(-1).sum()) // merged
    if num_tokens != num_features:
        raise ValueError(
            f"{num_tokens} tokens that stand for {pixels} and {num_features} features of {grid}: "
            "a row was cut within an image, or images and text are of different rows. Cut no row "
            "with images (truncation=False, max_length=None), or leave an image out with its "
            "tokens."
        )


def whole_inputs(
    model: Any, given: Mapping[str, Any], rows: RowsPass, length: int
) -> tuple[Arguments, RowsPass]:
    """(the model's arguments of whole rows, what the decoder has to know of them).

    For a batch `[B, L]` with images that is padded on either side: `input_ids` `[B, length]` of
    rows that begin in the first column, and in Qwen's models `position_ids` `[3, B, length]`.
    """
    ids = given["input_ids"]
    padded: Arguments = {"input_ids": _moved(ids, rows, length)}
    images = f"images {grids(given)}, checksum {checksum(given):016x}"
    rows = rows._replace(images=images)
    if (kinds := kinds_of(model)) and sees_both_ways(model):
        spans = spans_of(given[kinds], rows)
        in_windows = model.config.model_type == "gemma4"
        return padded, rows._replace(image_spans=spans, only_windows_see_ahead=in_windows)
    if not places_by_grid(model):
        return padded, rows
    read = {name: given.get(name) for name in PLACING}
    mask = given.get("attention_mask")
    positions, _ = model.model.get_rope_index(ids, attention_mask=mask, **read)
    padded["position_ids"] = torch.stack([_moved(each, rows, length) for each in positions])
    return padded, rows


def _moved(columns: Tensor, rows: RowsPass, length: int) -> Tensor:
    """`[B, length]`, 0 on padding, of `[B, L]`."""
    moved = columns.new_zeros(len(columns), length)
    for number, (start, stop) in enumerate(rows.spans):
        moved[number, : stop - start] = columns[number, start:stop]
    return moved


def own_tokens(whole: Arguments, held: Tensor) -> tuple[Arguments, Arguments]:
    """(a decoder's arguments of this rank's tokens, those of them that place images).

    Args:
        whole: of whole rows: `inputs_embeds` `[B, L, hidden]`, in Gemma 4 `per_layer_inputs`
            `[B, L, layers, size]`, in Qwen's models `position_ids`
            `[3, B, L]`, and in Qwen3-VL which tokens are of images, `[B, L]`, with what is added
            to them in early layers, `[tokens of images, hidden]` for each of these layers.
        held: which tokens this rank has, in its order.
    """
    own = {name: value for name, value in whole.items() if name not in (_MASK, _FEATURES)}
    own |= {name: own[name].index_select(1, held) for name in _CUT if own.get(name) is not None}
    placed = {}
    if own["position_ids"].ndim == 3:
        placed["position_ids"] = own.pop("position_ids").index_select(2, held)
    is_image = whole.get(_MASK)
    if is_image is not None:
        numbers = (is_image.flatten().cumsum(0) - 1).view_as(is_image)
        placed[_MASK] = is_image.index_select(1, held)
        chosen = numbers.index_select(1, held)[placed[_MASK]]
        placed[_FEATURES] = [features.index_select(0, chosen) for features in whole[_FEATURES]]
    return own, placed


Spans = tuple[tuple[int, int], ...]
"""(first, one past the last) token of each image in a row."""


def spans_of(kinds: Tensor, rows: RowsPass) -> Spans:
    """Returns where the images of rows are, neighbours as one; `kinds` `[B, L]` is 1 on their
    tokens, and 2 on those of videos.

    Raises ValueError for rows that have them in different places: a batch has one mask.
    """
    is_image = ((kinds == 1) | (kinds == 2)).cpu()
    by_row = {
        _runs(row[start:stop]) for row, (start, stop) in zip(is_image, rows.spans, strict=True)
    }
    if len(by_row) > 1:
        raise ValueError(
            f"{len(rows.spans)} rows with images in different places: tokens of an image see each "
            "other in both directions, so that each row has a mask of its own. Give one row a "
            "batch, and accumulate gradients."
        )
    return by_row.pop()


def _runs(row: Tensor) -> Spans:
    edges = torch.diff(row.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()
    found: list[int] = edges[:, 0].tolist()
    return tuple(zip(found[::2], found[1::2], strict=True))


def spans_mask(num_tokens: int, spans: Spans) -> Mask:
    """Causal, and within each span in both directions."""
    edges = [0, *(edge for span in spans for edge in span), num_tokens]
    regions = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        here = Interval(start, stop)
        is_image = bool(number % 2)
        regions.append(Piece(here, Interval(0, start), FULL))
        regions.append(Piece(here, here, FULL if is_image else CAUSAL))
    name = f"causal, {len(spans)} images in both directions"
    return mask_of(num_tokens, [piece for piece in regions if piece.area], name)
