"""What a tiny model of each family has beside causal attention."""

from typing import Any

VOCABULARY = 97
WINDOW = 7

_WINDOWED: dict[str, Any] = {"sliding_window": WINDOW}
_ALTERNATING = _WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}
_QWEN_WINDOW = _WINDOWED | {"use_sliding_window": True}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FOUR: dict[str, Any] = {"num_experts": 4}
_FOUR_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FOUR_IN_TWO_GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_DENSE_FIRST: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
_MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
}
_ROPE_PER_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
}
_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_DELTA: dict[str, Any] = _HYBRID | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_CAPPED: dict[str, Any] = {"final_logit_softcapping": 3.0}
_GEMMA_2: dict[str, Any] = _ALTERNATING | {
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 2.0,
}
_DENSE_THEN_ROUTED: dict[str, Any] = (
    _EXPERTS | _FOUR_IN_TWO_GROUPS | {"n_routed_experts": 4, "first_k_dense_replace": 1}
)
_CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_SHARED_EXPERT = {"num_experts": 4, "shared_expert_intermediate_size": 48}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_YARN_64 = _YARN | {
    **{"factor": 64.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_LATENT_EXPERTS = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1}

_SHARED_KEYS: dict[str, Any] = _WINDOWED | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "final_logit_softcapping": 3.0,
}

FEATURES: dict[str, dict[str, Any]] = {
    "mistral": _WINDOWED,
    "ministral": _ALTERNATING,
    "ministral3": _WINDOWED | {"rope_parameters": _YARN_64},
    "mixtral": _WINDOWED | _FOUR_LOCAL,
    "qwen2": _QWEN_WINDOW | {"max_window_layers": 1},
    "qwen2_moe": _QWEN_WINDOW
    | _EXPERTS
    | {
        "num_hidden_layers": 3,
        "num_experts": 4,
        "max_window_layers": 3,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "qwen3": _QWEN_WINDOW | {"max_window_layers": 1},
    "qwen3_moe": _QWEN_WINDOW | _EXPERTS | {"num_experts": 4},
    "gemma2": _GEMMA_2,
    "gemma3_text": _ALTERNATING
    | _CAPPED
    | {"query_pre_attn_scalar": 12, "rope_parameters": _ROPE_PER_LAYER},
    "gemma3n_text": _SHARED_KEYS
    | {"laurel_rank": 8, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]},
    "gemma4_text": _SHARED_KEYS
    | {"global_head_dim": 24, "enable_moe_block": True, "num_experts": 4}
    | {"top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4_unified_text": _ALTERNATING
    | {"global_head_dim": 24, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
    "gpt_oss": _ALTERNATING
    | _FOUR_LOCAL
    | {"rope_parameters": _YARN | {"original_max_position_embeddings": 128, "truncate": False}},
    "phi3": _WINDOWED | {"rope_parameters": _PARTIAL},
    "olmo": {"clip_qkv": 1.0},
    "olmo3": _ALTERNATING | {"rope_parameters": _ROPE_PER_LAYER},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": _ALTERNATING | {"logit_scale": 0.7},
    "smollm3": _ALTERNATING | {"use_sliding_window": True, "no_rope_layers": [0, 1]},
    "starcoder2": _WINDOWED,
    "granite": _MULTIPLIERS,
    "exaone4": _ALTERNATING,
    "lara_mini": _DELTA
    | _EXPERTS
    | _SHARED_EXPERT
    | _WINDOWED
    | {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
    "qwen3_next": _DELTA | _EXPERTS | _SHARED_EXPERT,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS | _SHARED_EXPERT,
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "bamba": _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA
    | _HYBRID
    | _MULTIPLIERS
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 12,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    },
    "zamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_d_state": 12,
        "mamba_ngroups": 2,
        "head_dim": 16,
        "chunk_size": 8,
        "num_mem_blocks": 2,
        "adapter_rank": 6,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
    },
    "falcon_h1": _MAMBA
    | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.7, "mlp_multipliers": [0.8, 1.3]},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _EXPERTS | _CONVOLUTIONS | _FOUR | {"num_dense_layers": 1},
    "lfm3": _WINDOWED
    | {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "conv_L_cache": 4,
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "llama4_text": {
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": WINDOW,
        "floor_scale": 5,
        "attn_scale": 0.4,
        "moe_layers": [0, 1],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size_mlp": 80,
    },
    "kimi_linear": _HYBRID
    | _LATENT
    | {
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
    },
    "bailing_hybrid": _HYBRID
    | _LATENT
    | _EXPERTS
    | {"num_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v2": _LATENT | _LATENT_EXPERTS | {"first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v3": _LATENT
    | _LATENT_EXPERTS
    | {
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": _YARN | {"original_max_position_embeddings": 8, "mscale_all_dim": 1.0},
    },
    "mistral4": _LATENT
    | _LATENT_EXPERTS
    | {
        "head_dim": 20,
        "rope_parameters": _YARN
        | {
            **{"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "partial_rotary_factor": 0.4},
        },
    },
    "glm4_moe_lite": _LATENT | _LATENT_EXPERTS | {"v_head_dim": 24},
    "sarvam_mla": _LATENT | _LATENT_EXPERTS | _FOUR_IN_TWO_GROUPS | {"first_k_dense_replace": 1},
    "minicpm3": _LATENT | {"dim_model_base": 32},
    "youtu": _LATENT,
    "axk1": _LATENT | _LATENT_EXPERTS | {"n_group": 2, "topk_group": 1},
    "cwm": _ALTERNATING | {"bos_token_id": 1},
    "hyperclovax": _MULTIPLIERS,
    "nanochat": _CAPPED,
    "phi": {"qk_layernorm": True},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "vaultgemma": _GEMMA_2,
    "granite_swa": _ALTERNATING | _MULTIPLIERS | {"layer_rope_theta": [1e4, 1e6]},
    "granitemoe": _MULTIPLIERS | _FOUR_LOCAL,
    "granitemoeshared": _MULTIPLIERS | _FOUR_LOCAL | {"shared_intermediate_size": 48},
    "granitemoe_swa": _ALTERNATING | _MULTIPLIERS | _FOUR_LOCAL | {"layer_rope_theta": [1e4, 1e6]},
    "afmoe": _ALTERNATING
    | _EXPERTS
    | _FOUR
    | {"num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "beam": _ALTERNATING
    | _EXPERTS
    | _FOUR
    | _DENSE_FIRST
    | {"n_group": 2, "topk_group": 1, "final_logit_softcapping": 3.0},
    "cohere2_moe": _ALTERNATING | _EXPERTS | _FOUR | {"num_shared_experts": 1, "logit_scale": 0.7},
    "dots1": _ALTERNATING | _DENSE_THEN_ROUTED,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_layer_end_index": 1,
    },
    "exaone_moe": _ALTERNATING | _EXPERTS | _FOUR | _DENSE_FIRST,
    "flex_olmo": _FOUR | {"num_experts_per_tok": 2},
    "flint": _ALTERNATING | _EXPERTS | _FOUR | _SHARED_EXPERT | {"mlp_only_layers": [0]},
    "glm4_moe": _DENSE_THEN_ROUTED | {"use_qk_norm": True},
    "hunyuan_v1_moe": _FOUR | {"moe_topk": 2},
    "hy_v3": _EXPERTS | _FOUR | _DENSE_FIRST,
    "jetmoe": _FOUR_LOCAL | {"kv_channels": 16},
    "kolibri1": _ALTERNATING | _EXPERTS | _SHARED_EXPERT | {"num_local_experts": 4},
    "laguna": _ALTERNATING
    | _EXPERTS
    | _FOUR
    | _SHARED_EXPERT
    | _DENSE_FIRST
    | {"num_attention_heads_per_layer": [4, 8]},
    "mellum": _ALTERNATING
    | _EXPERTS
    | {"num_local_experts": 4, "mlp_layer_types": ["sparse", "sparse"]},
    "mimo_v2_flash": _ALTERNATING
    | _EXPERTS
    | _FOUR_IN_TWO_GROUPS
    | _DENSE_FIRST
    | {"n_routed_experts": 4, "v_head_dim": 8},
    "minimax_m2": _FOUR_LOCAL,
    "phimoe": _WINDOWED | _FOUR_LOCAL | {"router_jitter_noise": 0.0},
    "sarvam_moe": _DENSE_THEN_ROUTED,
    "solar_open": _EXPERTS | _FOUR_IN_TWO_GROUPS | {"n_routed_experts": 4},
}
"""Features of a family beside causal attention, small enough to matter in rows of 30 tokens."""
