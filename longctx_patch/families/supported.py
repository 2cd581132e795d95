"""The table of support, as data: every family that is supported.

A family is supported when all its mixing of tokens goes through transformers' attention registry or
through the recurrences and short convolutions that run over chains (`hf/call/mixers.py`), its
positions come from `position_ids`, and tests/families/test_checks.py compares it with stock eager
attention. Of some others it is said why they are not. This file imports no torch and no
transformers.
"""

from collections.abc import Mapping
from types import MappingProxyType

from longctx_patch.families.family import (
    CHUNKS,
    CONVOLUTION,
    DELTA,
    EXPERTS,
    IMAGES,
    LATENT,
    ROUTER,
    SINKS,
    SOFTCAP,
    STATE_SPACE,
    TEMPERATURE,
    WINDOW,
    Family,
    LogitsRule,
    supported,
)

GEMMA_LOGITS = LogitsRule(operation="softcap", holder="config", attribute="final_logit_softcapping")
COHERE_LOGITS = LogitsRule(operation="multiply", holder="model", attribute="logit_scale")
HYPERCLOVA_LOGITS = LogitsRule(operation="multiply", holder="config", attribute="logits_scaling")
FALCON_LOGITS = LogitsRule(operation="multiply", holder="config", attribute="lm_head_multiplier")
GRANITE_LOGITS = LogitsRule(operation="divide", holder="config", attribute="logits_scaling")

TABLE = (
    supported("llama", "Llama 1 to 3"),
    supported("mistral", "Mistral", WINDOW),
    supported("ministral", "Ministral", WINDOW),
    supported("ministral3", "Ministral 3 (text)", WINDOW),
    supported("mixtral", "Mixtral", WINDOW, ROUTER),
    supported("qwen2", "Qwen2, Qwen2.5", WINDOW),
    supported("qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", WINDOW, ROUTER),
    supported("qwen3", "Qwen3", WINDOW),
    supported("mistral3", "Mistral Small 3.1 to 4, Ministral 3", IMAGES, WINDOW, LATENT, EXPERTS),
    supported("qwen2_vl", "Qwen2-VL", IMAGES, WINDOW),
    supported("qwen2_5_vl", "Qwen2.5-VL", IMAGES, WINDOW),
    supported("qwen3_vl", "Qwen3-VL", IMAGES),
    supported("qwen3_vl_moe", "Qwen3-VL-MoE", IMAGES, ROUTER),
    supported("qwen3_5", "Qwen3.5, Qwen3.6", DELTA, IMAGES),
    supported("qwen3_5_moe", "Qwen3.5-MoE, Qwen3.6-MoE", DELTA, IMAGES, ROUTER),
    supported("qwen3_moe", "Qwen3-MoE", WINDOW, ROUTER),
    supported("gemma", "Gemma"),
    supported("gemma2", "Gemma 2", WINDOW, SOFTCAP, logits=GEMMA_LOGITS),
    supported("gemma3", "Gemma 3", IMAGES, WINDOW),
    supported("gemma3_text", "Gemma 3 (text)", WINDOW, logits=GEMMA_LOGITS),
    supported("gemma3n_text", "Gemma 3n (text)", WINDOW, logits=GEMMA_LOGITS),
    supported("gemma4", "Gemma 4", IMAGES, WINDOW, EXPERTS, logits=GEMMA_LOGITS),
    supported("gemma4_unified", "Gemma 4 12B", IMAGES, WINDOW, logits=GEMMA_LOGITS),
    supported("gemma4_text", "Gemma 4 (text)", WINDOW, EXPERTS, logits=GEMMA_LOGITS),
    supported("gemma4_unified_text", "Gemma 4 12B (text)", WINDOW, logits=GEMMA_LOGITS),
    supported("gpt_oss", "gpt-oss", WINDOW, SINKS, ROUTER),
    supported("phi3", "Phi-3, Phi-3.5, Phi-4", WINDOW),
    supported("olmo", "OLMo"),
    supported("olmo2", "OLMo 2"),
    supported("olmo3", "OLMo 3", WINDOW),
    supported("olmoe", "OLMoE", ROUTER),
    supported("cohere", "Command R, Aya", logits=COHERE_LOGITS),
    supported("cohere2", "Command R7B, Command A", WINDOW, logits=COHERE_LOGITS),
    supported("smollm3", "SmolLM3", WINDOW),
    supported("starcoder2", "StarCoder2", WINDOW),
    supported("granite", "Granite 3", logits=GRANITE_LOGITS),
    supported("glm", "GLM-4 (9B)"),
    supported("glm4", "GLM-4-0414"),
    supported("exaone", "EXAONE 3, EXAONE 3.5"),
    supported("exaone4", "EXAONE 4", WINDOW),
    supported("ernie4_5", "ERNIE 4.5"),
    supported("seed_oss", "Seed-OSS"),
    supported("arcee", "Arcee AFM"),
    supported("helium", "Helium 1"),
    supported("deepseek_v2", "DeepSeek-V2", LATENT, EXPERTS),
    supported("deepseek_v3", "DeepSeek-V3, DeepSeek-R1, Kimi K2", LATENT, EXPERTS),
    supported("glm4_moe_lite", "GLM-4.7-Flash", LATENT, EXPERTS),
    supported("sarvam_mla", "Sarvam 105B", LATENT, EXPERTS),
    supported("minicpm3", "MiniCPM3", LATENT),
    supported("youtu", "Youtu-LLM", LATENT),
    supported("mistral4", "Mistral Small 4 (text)", LATENT, EXPERTS),
    supported("axk1", "A.X K1", LATENT, EXPERTS),
    supported("internlm3", "InternLM3"),
    supported("iquestcoder", "IQuest-Coder"),
    supported("apertus", "Apertus"),
    supported("apertus1p5_text", "Apertus 1.5 (text)"),
    supported("bitnet", "BitNet b1.58"),
    supported("cwm", "Code World Model (CWM)", WINDOW),
    supported("gpt_neox", "GPT-NeoX, Pythia"),
    supported("hunyuan_v1_dense", "Hunyuan (dense)"),
    supported("hyperclovax", "HyperCLOVA X SEED", logits=HYPERCLOVA_LOGITS),
    supported("jais2", "Jais 2"),
    supported("nanochat", "nanochat", logits=GEMMA_LOGITS),
    supported("nemotron", "Nemotron 3, Nemotron 4"),
    supported("persimmon", "Persimmon"),
    supported("phi", "Phi-1, Phi-1.5, Phi-2"),
    supported("stablelm", "StableLM"),
    supported("vaultgemma", "VaultGemma", WINDOW, SOFTCAP, logits=GEMMA_LOGITS),
    supported("granite_swa", "Granite Swash", WINDOW, SINKS, logits=GRANITE_LOGITS),
    supported("granitemoe", "Granite 3 MoE", ROUTER, logits=GRANITE_LOGITS),
    supported("granitemoeshared", "Granite MoE (shared)", ROUTER, logits=GRANITE_LOGITS),
    supported("granitemoe_swa", "Granite Swash MoE", WINDOW, SINKS, ROUTER, logits=GRANITE_LOGITS),
    supported("afmoe", "Trinity (AFMoE)", WINDOW, EXPERTS),
    supported("aria_text", "Aria (text)", EXPERTS),
    supported("beam", "Beam 1", WINDOW, EXPERTS, logits=GEMMA_LOGITS),
    supported("cohere2_moe", "Command A+", WINDOW, EXPERTS, logits=COHERE_LOGITS),
    supported("dots1", "dots.llm1", WINDOW, EXPERTS),
    supported("ernie4_5_moe", "ERNIE 4.5 (experts)", ROUTER),
    supported("exaone_moe", "K-EXAONE", WINDOW, EXPERTS),
    supported("flex_olmo", "FlexOlmo", ROUTER),
    supported("flint", "Flint", WINDOW, SINKS, ROUTER),
    supported("glm4_moe", "GLM-4.5, GLM-4.6, GLM-4.7", EXPERTS),
    supported("hunyuan_v1_moe", "Hunyuan-A13B", EXPERTS),
    supported("hy_v3", "Hunyuan 3 (Hy3)", EXPERTS),
    supported("jetmoe", "JetMoE", ROUTER),
    supported("kolibri1", "Kolibri 1", WINDOW, EXPERTS),
    supported("laguna", "Laguna", WINDOW, ROUTER),
    supported("mellum", "Mellum 2", WINDOW, ROUTER),
    supported("mimo_v2_flash", "MiMo-V2-Flash", WINDOW, SINKS, EXPERTS),
    supported("minimax_m2", "MiniMax-M2", ROUTER),
    supported("solar_open", "Solar Open", EXPERTS),
    supported("sarvam_moe", "Sarvam 30B", EXPERTS),
    supported("phimoe", "Phi-3.5-MoE", WINDOW, ROUTER),
    supported("llama4_text", "Llama 4 (text)", CHUNKS, TEMPERATURE, EXPERTS),
    supported("qwen3_next", "Qwen3-Next", DELTA, ROUTER),
    supported("qwen3_5_text", "Qwen3.5, Qwen3.6 (text)", DELTA),
    supported("qwen3_5_moe_text", "Qwen3.5-MoE, Qwen3.6-MoE (text)", DELTA, ROUTER),
    supported("olmo_hybrid", "OLMo Hybrid", DELTA),
    supported("lara_mini", "Lara 4 Mini", DELTA, WINDOW, ROUTER),
    supported("kimi_linear", "Kimi Linear", DELTA, LATENT, EXPERTS),
    supported("bailing_hybrid", "Ling 3 (hybrid)", DELTA, LATENT, EXPERTS),
    supported("bamba", "Bamba", STATE_SPACE),
    supported("granitemoehybrid", "Granite 4", STATE_SPACE, ROUTER, logits=GRANITE_LOGITS),
    supported("nemotron_h", "Nemotron-H", STATE_SPACE, EXPERTS),
    supported("falcon_h1", "Falcon-H1", STATE_SPACE, logits=FALCON_LOGITS),
    supported("zamba2", "Zamba 2", STATE_SPACE),
    supported("lfm2", "LFM2", CONVOLUTION),
    supported("lfm2_moe", "LFM2-MoE", CONVOLUTION, EXPERTS),
    supported("lfm3", "LFM3", CONVOLUTION, WINDOW),
)
"""Every family that is supported."""

FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in TABLE})
"""model_type -> family, of what can be patched."""


NOT_PROVEN = "not compared with one process, so not proven to be exact"
"""Why a model type that the table does not name is refused."""
_OWN_RECURRENCE = (
    "its recurrence is affine in its state, but no code here hands that state from rank to rank, "
    "so that it would start anew on each"
)
_INDEXER = "an indexer picks the keys of each token, and a rank has those of its own tokens alone"
_TWICE = "its layers have two attentions, and what a step takes and sends is predicted for one"
_SHORT = "its learned positions end at the pretrained length, so there are no longer rows"
_OWN_ATTENTION = "its attention is its own code, not transformers' attention registry"
_NOT_HANDED_ON = "its model hands its layers no further arguments, so they can't know of shards"
_IMAGES = (
    "with images its model is not compared with one process; `longctx patch`, the recipes and "
    "`longctx_patch.plugin.text_model` take such a checkpoint and train its text model"
)

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), _OWN_RECURRENCE),
        **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm", "minimax"), _OWN_RECURRENCE),
        "mamba2": "it has no attention, whose heads degrees, plans and memory are counted in",
        **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"), _INDEXER),
        **dict.fromkeys(("dots3_note_text", "minimax_m3_vl_text", "qwen4_exp_text"), _INDEXER),
        "deepseek_v4": "keys are compressed over blocks of tokens, which reach over a shard's edge",
        **dict.fromkeys(("longcat_flash", "diffllama", "dory", "hrm_text"), _TWICE),
        **dict.fromkeys(("biogpt", "gpt-sw3", "gpt2", "gpt_bigcode", "opt"), _SHORT),
        **dict.fromkeys(("falcon", "gpt_neo", "gptj", "codegen", "ctrl", "xglm"), _OWN_ATTENTION),
        **dict.fromkeys(("bloom", "mpt", "modernbert-decoder"), _NOT_HANDED_ON),
        "llama4": _IMAGES,
        "gemma3n": "it reads images or sound too; train its text model (gemma3n_text)",
    }
)
"""model_type -> why it can't be patched."""


def refusal_of(model_type: str) -> str | None:
    """Says why this model type can't be patched, or None."""
    return None if model_type in FAMILIES else REFUSED.get(model_type, NOT_PROVEN)
