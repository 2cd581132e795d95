"""Tiny models that read images beside text, of every family whose text model is trained."""

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from longctx_patch.hf.model.text_part import TEXT_TYPES
from tests.hf.tiny import VOCABULARY

WHOLE = [name for name in TEXT_TYPES if name in CONFIG_MAPPING_NAMES]
IMAGE, VIDEO, START, END = 90, 91, 92, 93
"""Tokens of a picture's patches, of a video's, and around them."""

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
_PARTS: dict[str, dict[str, Any]] = {
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
        "text_config": _WINDOWED,
        "vision_config": _GEMMA_EYE | {"image_size": 8},
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": _WINDOWED
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
        | {"global_head_dim": 24, "pad_token_id": 0},
        "vision_config": _GEMMA_EYE | {"num_key_value_heads": 2, "head_dim": 8},
        "audio_config": None,
        "image_token_id": IMAGE,
    },
    "gemma4_unified": {
        "text_config": _WINDOWED | {"global_head_dim": 24, "pad_token_id": 0},
        "vision_config": {"patch_size": 2, "mm_embed_dim": 16, "output_proj_dims": 16},
        "image_token_id": IMAGE,
    },
}


def seeing_config(family: str, *, tied: bool = False, **text: Any) -> Any:
    """A tiny config; `text`: further options of its text model."""
    parts = copy.deepcopy(_PARTS[family])
    parts["text_config"] |= text | {"tie_word_embeddings": tied}
    return AutoConfig.for_model(
        family, **parts, tie_word_embeddings=tied, attn_implementation="eager"
    )


def seeing_model(family: str, *, tied: bool = False, **text: Any) -> Any:
    """A model in training mode with the same weights each time; norms aren't 1, biases not 0."""
    torch.manual_seed(0)
    config = seeing_config(family, tied=tied, **text)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.train()
