"""What a tiny model of each family has beside causal attention: it matters in rows of 30 tokens."""

from typing import Any

VOCABULARY = 97
WINDOW = 7

SIZES: dict[str, Any] = {
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "topk_group"), 1),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 2,
    # What scales numbers.
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "logit_scale": 0.7,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    # Recurrent layers.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups", "mamba_expand"), 2),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 12),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    # Latents.
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
"""For every family whose config has such a number by default."""

_ALTERNATING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_WINDOWED: dict[str, Any] = {"sliding_window": WINDOW}
_QWEN_WINDOW = _WINDOWED | {"use_sliding_window": True, "max_window_layers": 1}
_DENSE_FIRST: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
_CAP = {"final_logit_softcapping": 3.0}
_GEMMA: dict[str, Any] = _ALTERNATING | {"query_pre_attn_scalar": 12}
_ROPE_PER_LAYER = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    }
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
_SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}


def _yarn(original: int, factor: float = 4.0, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor}
    return {"rope_parameters": rope | {"original_max_position_embeddings": original, **more}}


FEATURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ministral", "cohere2", "exaone4", "kolibri1"), _ALTERNATING),
    **dict.fromkeys(("mixtral", "starcoder2"), _WINDOWED),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), _QWEN_WINDOW),
    **dict.fromkeys(("gemma2", "vaultgemma"), _GEMMA | {"final_logit_softcapping": 2.0}),
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa"), _ALTERNATING | {"layer_rope_theta": [1e4, 1e6]}
    ),
    **dict.fromkeys(("beam", "exaone_moe"), _ALTERNATING | _DENSE_FIRST),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid"), _HYBRID
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTIONS),
    **dict.fromkeys(("youtu", "axk1", "sarvam_mla"), _LATENT | {"q_lora_rank": 24}),
    "ministral3": _WINDOWED | _yarn(8, 64.0, llama_4_scaling_beta=0.5),
    "qwen2_moe": _QWEN_WINDOW
    | {"num_hidden_layers": 3, "max_window_layers": 3, "mlp_only_layers": [1]},
    "gemma3_text": _GEMMA | _CAP | _ROPE_PER_LAYER,
    "gemma3n_text": _SHARED_KEYS
    | {"laurel_rank": 8, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]},
    "gemma4_text": _SHARED_KEYS
    | _CAP
    | {"global_head_dim": 24, "enable_moe_block": True, "num_experts": 4}
    | {"top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4_unified_text": _ALTERNATING
    | _CAP
    | {"global_head_dim": 24, "num_global_key_value_heads": 1},
    "gpt_oss": _ALTERNATING | _yarn(128, truncate=False),
    "phi3": _WINDOWED
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        }
    },
    "phimoe": _WINDOWED | {"router_jitter_noise": 0.0},
    "olmo": {"clip_qkv": 1.0},
    "olmo3": _ALTERNATING | _ROPE_PER_LAYER,
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "smollm3": _WINDOWED | _ALTERNATING | {"use_sliding_window": True, "no_rope_layers": [0, 1]},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "deepseek_v2": _LATENT
    | {"q_lora_rank": None, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v3": _LATENT | _yarn(8, mscale_all_dim=1.0),
    "mistral4": _LATENT
    | {"head_dim": 20}
    | _yarn(8, llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=1.0, partial_rotary_factor=0.4),
    "glm4_moe_lite": _LATENT | {"v_head_dim": 24},
    "minicpm3": _LATENT | {"dim_model_base": 32},
    "cohere2_moe": _ALTERNATING | {"num_shared_experts": 1, "moe_intermediate_size": 32},
    "dots1": _ALTERNATING
    | {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1},
    "mimo_v2_flash": _ALTERNATING | _DENSE_FIRST | {"n_shared_experts": 1, "v_head_dim": 8},
    "cwm": _ALTERNATING | {"bos_token_id": 1},
    "phi": {"qk_layernorm": True},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "granitemoeshared": {"shared_intermediate_size": 48},
    "afmoe": _ALTERNATING | {"mup_enabled": True},
    "ernie4_5_moe": {"moe_layer_end_index": 1},
    "flint": _ALTERNATING | {"mlp_only_layers": [0]},
    "glm4_moe": {"use_qk_norm": True},
    "hy_v3": _DENSE_FIRST,
    "jetmoe": {"kv_channels": 16},
    "laguna": _ALTERNATING | _DENSE_FIRST | {"num_attention_heads_per_layer": [4, 8]},
    "mellum": _ALTERNATING | {"mlp_layer_types": ["sparse", "sparse"]},
    "llama4_text": {
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "floor_scale": 5,
        "attn_scale": 0.4,
        "moe_layers": [0, 1],
        "intermediate_size_mlp": 80,
    },
    "olmo_hybrid": _HYBRID | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "lara_mini": _HYBRID
    | {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
    "kimi_linear": _HYBRID
    | _LATENT
    | {"q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "bailing_hybrid": _HYBRID | _LATENT | {"q_lora_rank": 24, "n_group": 2},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]},
    "falcon_h1": {"mamba_d_ssm": 128, "lm_head_multiplier": 0.7, "mlp_multipliers": [0.8, 1.3]},
    "zamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_mem_blocks": 2,
        "adapter_rank": 6,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
    },
    "lfm3": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "conv_L_cache": 4,
    },
}
"""What a family needs beyond `SIZES`."""
