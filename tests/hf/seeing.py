"""Tiny models that read images beside text, of every family whose text model is trained."""

import copy
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from longctx_patch.families.text_part import TEXT_TYPES
from tests.hf.float64 import padded_rows
from tests.hf.tiny import VOCABULARY, features_of

MINISTRAL, SMALL_4 = "mistral3 with ministral3", "mistral3 with mistral4"
LARGE_GEMMA = "gemma4 whose images see both ways"
WHOLE = [
    name
    for name in (*TEXT_TYPES, MINISTRAL, SMALL_4, LARGE_GEMMA)
    if name.split()[0] in CONFIG_MAPPING_NAMES
]
"""Model types, and of one those whose text model is of another family than by default."""
IMAGE, VIDEO, START, END = 90, 91, 92, 93
"""Tokens of a picture's patches, of a video's, and around them."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
_QWEN = _TEXT | {"rope_parameters": _MROPE}
_WINDOWED = _TEXT | {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
}
_DELTA = _TEXT | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 24}

_EYE: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_GRID = _EYE | {"num_position_embeddings": 16}
_DEEP = _GRID | {"deepstack_visual_indexes": [0, 2]}
_GEMMA_EYE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
}
_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_PIXTRAL: dict[str, Any] = {
    "vision_config": _GEMMA_EYE | {"image_size": 8, "head_dim": 8},
    "image_token_index": IMAGE,
}
_GEMMA_4: dict[str, Any] = {
    "vision_config": _GEMMA_EYE
    | {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2}
    | {"position_embedding_size": 16},
    "audio_config": None,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}
_PARTS: dict[str, dict[str, Any]] = {
    "llama4": {
        "text_config": _TEXT | features_of("llama4_text"),
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "image_size": 8, "patch_size": 2},
            **{"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
        },
        "image_token_index": IMAGE,
    },
    "mistral3": {"text_config": _TEXT | {"model_type": "mistral"}, **_PIXTRAL},
    MINISTRAL: {
        "text_config": _TEXT | features_of("ministral3") | {"model_type": "ministral3"},
        **_PIXTRAL,
    },
    SMALL_4: {
        "text_config": _TEXT | features_of("mistral4") | {"model_type": "mistral4"},
        **_PIXTRAL,
    },
    "qwen2_vl": {
        "text_config": _QWEN,
        "vision_config": {
            **{"depth": 2, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
            **{"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2},
        },
        **_IDS,
    },
    "qwen2_5_vl": {
        "text_config": _QWEN,
        "vision_config": _EYE | {"window_size": 8, "fullatt_block_indexes": [1]},
        **_IDS,
    },
    "qwen3_vl": {"text_config": _QWEN, "vision_config": _DEEP, **_IDS},
    "qwen3_vl_moe": {"text_config": _QWEN | _EXPERTS, "vision_config": _DEEP, **_IDS},
    "qwen3_5": {"text_config": _DELTA, "vision_config": _GRID, **_IDS},
    "qwen3_5_moe": {"text_config": _DELTA | _SHARED, "vision_config": _GRID, **_IDS},
    "gemma3": {
        "text_config": _WINDOWED | {"final_logit_softcapping": 3.0},
        "vision_config": _GEMMA_EYE | {"image_size": 8, "vision_use_head": False},
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": _WINDOWED
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
        | {"global_head_dim": 24, "pad_token_id": 0, "final_logit_softcapping": 3.0},
        **_GEMMA_4,
    },
    LARGE_GEMMA: {
        "text_config": _WINDOWED
        | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
        | {"global_head_dim": 24, "pad_token_id": 0},
        **_GEMMA_4,
    },
    "gemma4_unified": {
        "text_config": _WINDOWED
        | {"use_bidirectional_attention": "vision", "final_logit_softcapping": 3.0}
        | {"global_head_dim": 24, "pad_token_id": 0},
        "vision_config": {
            **{"patch_size": 2, "pooling_kernel_size": 1, "mm_posemb_size": 16},
            **{"mm_embed_dim": 16, "output_proj_dims": 16},
        },
        "audio_config": None,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
    },
}


def seeing_config(
    family: str, *, tied: bool = False, vision: Mapping[str, Any] = NOTHING, **text: Any
) -> Any:
    """A tiny config; `text`: further options of its text model, `vision` of its image encoder."""
    parts = copy.deepcopy(_PARTS[family])
    parts["vision_config"] |= vision
    parts["text_config"] |= text | {"tie_word_embeddings": tied}
    return AutoConfig.for_model(
        family.split()[0], **parts, tie_word_embeddings=tied, attn_implementation="eager"
    )


def seeing_model(
    family: str, *, tied: bool = False, vision: Mapping[str, Any] = NOTHING, **text: Any
) -> Any:
    """A model in training mode with the same weights each time; norms aren't 1, biases not 0."""
    torch.manual_seed(0)
    config = seeing_config(family, tied=tied, vision=vision, **text)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.train()


def text_rows() -> dict[str, Any]:
    """Padded rows without the tokens that stand for images."""
    rows: dict[str, Any] = padded_rows()
    for name in ("input_ids", "labels"):
        rows[name] = rows[name].clamp(max=IMAGE - 1)
    return rows


def seen_rows(family: str, *, video: bool = False) -> dict[str, Any]:
    """Two rows with pictures of different sizes, as a processor makes them: one padded on the
    left, one on both sides. `video`: with one in the second row, too.

    Those of Gemma 3 are all of one size, in the same places of both rows, two of them neighbours.
    """
    if family == "gemma3":
        return _gemma_rows()
    if family.startswith("mistral3"):
        return _mistral_rows()
    if family.startswith("gemma4"):
        return _gemma_4_rows(video, patches_of_token=1 if family == "gemma4_unified" else 4)
    draw = torch.Generator().manual_seed(7)
    pictures = [[(1, 4, 6), (1, 2, 4)], [(1, 6, 4)]]
    videos = [[], [(2, 4, 4)]] if video else [[], []]
    length, pads = 47, ((5, 0), (2, 9))
    ids = torch.randint(1, IMAGE, (2, length), generator=draw)
    kinds, mask = torch.zeros_like(ids), torch.ones_like(ids)
    for row, (left, right) in enumerate(pads):
        mask[row, :left] = mask[row, length - right :] = 0
        place = left + 3
        for kind, token, grids in ((1, IMAGE, pictures[row]), (2, VIDEO, videos[row])):
            for frames, height, width in grids:
                # Qwen3-VL puts text between the frames of a video; others take them in one piece.
                apart = family.startswith("qwen3") and kind == 2
                a_frame = height * width // 4
                for size in [a_frame] * frames if apart else [frames * a_frame]:
                    ids[row, place], ids[row, place + 1 : place + 1 + size] = START, token
                    kinds[row, place + 1 : place + 1 + size] = kind
                    place += size + 2
    batch = _labelled(ids, mask, prompt=9) | {"mm_token_type_ids": kinds}
    for name, all_grids in (("image", pictures), ("video", videos)):
        sizes = torch.tensor([grid for row in all_grids for grid in row])
        if len(sizes):
            pixels = torch.randn(int(sizes.prod(1).sum()), 24, generator=draw)
            batch[f"{name}_grid_thw"] = sizes
            batch["pixel_values" if name == "image" else "pixel_values_videos"] = pixels
    return batch


def _labelled(ids: Tensor, mask: Tensor, prompt: int = 0) -> dict[str, Any]:
    """Rows with labels of text after the prompt."""
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE) | (ids == VIDEO), -100)
    labels[:, :prompt] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _uneven_rows() -> tuple[torch.Generator, Tensor, Tensor]:
    """Ids and mask of two rows of text."""
    draw, length = torch.Generator().manual_seed(7), 41
    ids = torch.randint(1, IMAGE, (2, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = mask[1, length - 11 :] = 0
    return draw, ids, mask


def _gemma_rows() -> dict[str, Any]:
    draw, ids, mask = _uneven_rows()
    ids[:, 3:7] = ids[:, 14:22] = IMAGE  # the last two are together longer than the window
    pixels = torch.randn(6, 3, 8, 8, generator=draw)
    batch = _labelled(ids, mask) | {"pixel_values": pixels}
    return batch | {"token_type_ids": (ids == IMAGE).long()}


def _gemma_4_rows(video: bool, patches_of_token: int) -> dict[str, Any]:
    """Two rows with two pictures each, neighbours, in the same places; `video`: and with one of two
    frames. The second picture has fewer patches than the first."""
    draw, ids, mask = _uneven_rows()
    most, side = 4 * patches_of_token, math.isqrt(patches_of_token)
    kinds = torch.zeros_like(ids)
    ids[:, 3:9], kinds[:, 3:9] = IMAGE, 1

    def patches(sizes: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """(numbers, places) of pictures of so many tokens in width and height."""
        places = torch.full((len(sizes), most, 2), -1)
        for number, (wide, high) in enumerate(sizes):
            width, height = wide * side, high * side
            grid = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
            places[number, : width * height] = grid
        return torch.rand(len(sizes), most, 12, generator=draw), places

    batch: dict[str, Any] = {}
    batch["pixel_values"], batch["image_position_ids"] = patches([(2, 2), (2, 1)] * 2)
    if video:
        ids[:, 14:18], kinds[:, 14:18] = VIDEO, 2
        pixels, places = patches([(1, 2)] * 4)
        batch |= {"pixel_values_videos": pixels, "video_position_ids": places}
        batch["num_frames_per_video"] = torch.tensor([2, 2])
    return batch | _labelled(ids, mask) | {"mm_token_type_ids": kinds}


def _mistral_rows() -> dict[str, Any]:
    """Two rows of uneven lengths, with three pictures of two sizes."""
    sizes = ((8, 8), (8, 4), (4, 8))
    draw, ids, mask = _uneven_rows()
    for (row, place), (height, width) in zip(((0, 2), (0, 20), (1, 14)), sizes, strict=True):
        ids[row, place : place + height * width // 16] = IMAGE
    pixels = torch.zeros(3, 3, 8, 8)
    for number, (height, width) in enumerate(sizes):
        pixels[number, :, :height, :width] = torch.randn(3, height, width, generator=draw)
    batch = _labelled(ids, mask, prompt=7)
    return batch | {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def pictured_rows(
    family: str, number: int, seed: int, *, every: bool = True
) -> list[dict[str, Any]]:
    """Rows of one conversation each, as a processor makes them, of uneven lengths: none to two
    pictures of several sizes, and text around them. `every`: each row has a picture.

    Gemma 3's pictures have one size."""
    draw = torch.Generator().manual_seed(seed)

    def among(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    found = []
    for index in range(number):
        ids, kinds, grids, pixels = [], [], [], []
        for _ in range(among(1, 3) if every or index % 3 else 0):
            words = among(2, 6)
            grid = (1, 4, 4) if family == "gemma3" else (1, 2 * among(1, 4), 2 * among(1, 3))
            size = 4 if family == "gemma3" else grid[1] * grid[2] // 4
            ids += [*torch.randint(1, IMAGE, (words,), generator=draw).tolist(), START]
            ids += [IMAGE] * size
            kinds += [0] * (words + 1) + [1] * size
            shape = (1, 3, 8, 8) if family == "gemma3" else (grid[1] * grid[2], 24)
            grids.append(grid)
            pixels.append(torch.randn(shape, generator=draw))
        words = among(5, 14)
        ids += torch.randint(1, IMAGE, (words,), generator=draw).tolist()
        kinds += [0] * words
        labels = [
            -100 if kind or n < 4 else token
            for n, (token, kind) in enumerate(zip(ids, kinds, strict=True))
        ]
        found.append(
            {"input_ids": ids, "labels": labels, "kinds": kinds, "grids": grids, "pixels": pixels}
        )
    return found


def seen_together(family: str, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of them, padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)

    def stacked(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch = {
        "input_ids": stacked("input_ids", 0),
        "labels": stacked("labels", -100),
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "token_type_ids" if family == "gemma3" else "mm_token_type_ids": stacked("kinds", 0),
    }
    pixels = [of_one for row in rows for of_one in row["pixels"]]
    if pixels:
        batch["pixel_values"] = torch.cat(pixels)
        if family != "gemma3":
            batch["image_grid_thw"] = torch.tensor([grid for row in rows for grid in row["grids"]])
    return batch
