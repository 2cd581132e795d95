"""The table of support, as data: every family that is supported, and why others are refused.

A family is supported when all its mixing of tokens goes through transformers' attention registry or
through the recurrences and short convolutions that run over chains (`hf/call/mixers.py`), its
positions come from `position_ids`, and tests/hf/model/test_checks.py compares it with stock eager
attention. This file imports no torch and no transformers.
"""

from collections.abc import Mapping
from types import MappingProxyType

from longctx_patch.hf.model.family import (
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
)
from longctx_patch.hf.model.family import (
    refused as _refused,
)
from longctx_patch.hf.model.family import (
    supported as _supported,
)
from longctx_patch.hf.model.refused import REFUSED

GEMMA_LOGITS = LogitsRule(operation="softcap", holder="config", attribute="final_logit_softcapping")
COHERE_LOGITS = LogitsRule(operation="multiply", holder="model", attribute="logit_scale")
HYPERCLOVA_LOGITS = LogitsRule(operation="multiply", holder="config", attribute="logits_scaling")
FALCON_LOGITS = LogitsRule(operation="multiply", holder="config", attribute="lm_head_multiplier")
GRANITE_LOGITS = LogitsRule(operation="divide", holder="config", attribute="logits_scaling")

TEXT_IN_IT = (
    "`longctx patch`, the recipes and `longctx_patch.plugin.text_model` take such a checkpoint and "
    "train its text model"
)

TABLE = (
    _supported("llama", "Llama 1 to 3"),
    _supported("mistral", "Mistral", WINDOW),
    _supported("ministral", "Ministral", WINDOW),
    _supported("ministral3", "Ministral 3 (text)", WINDOW),
    _supported("mixtral", "Mixtral", WINDOW, ROUTER),
    _supported("qwen2", "Qwen2, Qwen2.5", WINDOW),
    _supported("qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", WINDOW, ROUTER),
    _supported("qwen3", "Qwen3", WINDOW),
    _supported("mistral3", "Mistral Small 3.1 to 4, Ministral 3", IMAGES, WINDOW, LATENT, EXPERTS),
    _supported("qwen2_vl", "Qwen2-VL", IMAGES, WINDOW),
    _supported("qwen2_5_vl", "Qwen2.5-VL", IMAGES, WINDOW),
    _supported("qwen3_vl", "Qwen3-VL", IMAGES),
    _supported("qwen3_vl_moe", "Qwen3-VL-MoE", IMAGES, ROUTER),
    _supported("qwen3_5", "Qwen3.5, Qwen3.6", DELTA, IMAGES),
    _supported("qwen3_5_moe", "Qwen3.5-MoE, Qwen3.6-MoE", DELTA, IMAGES, ROUTER),
    _supported("qwen3_moe", "Qwen3-MoE", WINDOW, ROUTER),
    _supported("gemma", "Gemma"),
    _supported("gemma2", "Gemma 2", WINDOW, SOFTCAP, logits=GEMMA_LOGITS),
    _supported("gemma3", "Gemma 3", IMAGES, WINDOW),
    _supported("gemma3_text", "Gemma 3 (text)", WINDOW, logits=GEMMA_LOGITS),
    _supported("gemma3n_text", "Gemma 3n (text)", WINDOW, logits=GEMMA_LOGITS),
    _supported("gemma4", "Gemma 4", IMAGES, WINDOW, EXPERTS, logits=GEMMA_LOGITS),
    _supported("gemma4_unified", "Gemma 4 12B", IMAGES, WINDOW, logits=GEMMA_LOGITS),
    _supported("gemma4_text", "Gemma 4 (text)", WINDOW, EXPERTS, logits=GEMMA_LOGITS),
    _supported("gemma4_unified_text", "Gemma 4 12B (text)", WINDOW, logits=GEMMA_LOGITS),
    _supported("gpt_oss", "gpt-oss", WINDOW, SINKS, ROUTER),
    _supported("phi3", "Phi-3, Phi-3.5, Phi-4", WINDOW),
    _supported("olmo", "OLMo"),
    _supported("olmo2", "OLMo 2"),
    _supported("olmo3", "OLMo 3", WINDOW),
    _supported("olmoe", "OLMoE", ROUTER),
    _supported("cohere", "Command R, Aya", logits=COHERE_LOGITS),
    _supported("cohere2", "Command R7B, Command A", WINDOW, logits=COHERE_LOGITS),
    _supported("smollm3", "SmolLM3", WINDOW),
    _supported("starcoder2", "StarCoder2", WINDOW),
    _supported("granite", "Granite 3", logits=GRANITE_LOGITS),
    _supported("glm", "GLM-4 (9B)"),
    _supported("glm4", "GLM-4-0414"),
    _supported("exaone", "EXAONE 3, EXAONE 3.5"),
    _supported("exaone4", "EXAONE 4", WINDOW),
    _supported("ernie4_5", "ERNIE 4.5"),
    _supported("seed_oss", "Seed-OSS"),
    _supported("arcee", "Arcee AFM"),
    _supported("helium", "Helium 1"),
    _supported("deepseek_v2", "DeepSeek-V2", LATENT, EXPERTS),
    _supported("deepseek_v3", "DeepSeek-V3, DeepSeek-R1, Kimi K2", LATENT, EXPERTS),
    _supported("glm4_moe_lite", "GLM-4.7-Flash", LATENT, EXPERTS),
    _supported("sarvam_mla", "Sarvam 105B", LATENT, EXPERTS),
    _supported("minicpm3", "MiniCPM3", LATENT),
    _supported("youtu", "Youtu-LLM", LATENT),
    _supported("mistral4", "Mistral Small 4 (text)", LATENT, EXPERTS),
    _supported("axk1", "A.X K1", LATENT, EXPERTS),
    _supported("internlm3", "InternLM3"),
    _supported("iquestcoder", "IQuest-Coder"),
    _supported("apertus", "Apertus"),
    _supported("apertus1p5_text", "Apertus 1.5 (text)"),
    _supported("bitnet", "BitNet b1.58"),
    _supported("cwm", "Code World Model (CWM)", WINDOW),
    _supported("gpt_neox", "GPT-NeoX, Pythia"),
    _supported("hunyuan_v1_dense", "Hunyuan (dense)"),
    _supported("hyperclovax", "HyperCLOVA X SEED", logits=HYPERCLOVA_LOGITS),
    _supported("jais2", "Jais 2"),
    _supported("nanochat", "nanochat", logits=GEMMA_LOGITS),
    _supported("nemotron", "Nemotron 3, Nemotron 4"),
    _supported("persimmon", "Persimmon"),
    _supported("phi", "Phi-1, Phi-1.5, Phi-2"),
    _supported("stablelm", "StableLM"),
    _supported("vaultgemma", "VaultGemma", WINDOW, SOFTCAP, logits=GEMMA_LOGITS),
    _supported("granite_swa", "Granite Swash", WINDOW, SINKS, logits=GRANITE_LOGITS),
    _supported("granitemoe", "Granite 3 MoE", ROUTER, logits=GRANITE_LOGITS),
    _supported("granitemoeshared", "Granite MoE (shared)", ROUTER, logits=GRANITE_LOGITS),
    _supported("granitemoe_swa", "Granite Swash MoE", WINDOW, SINKS, ROUTER, logits=GRANITE_LOGITS),
    _supported("afmoe", "Trinity (AFMoE)", WINDOW, EXPERTS),
    _supported("aria_text", "Aria (text)", EXPERTS),
    _supported("beam", "Beam 1", WINDOW, EXPERTS, logits=GEMMA_LOGITS),
    _supported("cohere2_moe", "Command A+", WINDOW, EXPERTS, logits=COHERE_LOGITS),
    _supported("dots1", "dots.llm1", WINDOW, EXPERTS),
    _supported("ernie4_5_moe", "ERNIE 4.5 (experts)", ROUTER),
    _supported("exaone_moe", "K-EXAONE", WINDOW, EXPERTS),
    _supported("flex_olmo", "FlexOlmo", ROUTER),
    _supported("flint", "Flint", WINDOW, SINKS, ROUTER),
    _supported("glm4_moe", "GLM-4.5, GLM-4.6, GLM-4.7", EXPERTS),
    _supported("hunyuan_v1_moe", "Hunyuan-A13B", EXPERTS),
    _supported("hy_v3", "Hunyuan 3 (Hy3)", EXPERTS),
    _supported("jetmoe", "JetMoE", ROUTER),
    _supported("kolibri1", "Kolibri 1", WINDOW, EXPERTS),
    _supported("laguna", "Laguna", WINDOW, ROUTER),
    _supported("mellum", "Mellum 2", WINDOW, ROUTER),
    _supported("mimo_v2_flash", "MiMo-V2-Flash", WINDOW, SINKS, EXPERTS),
    _supported("minimax_m2", "MiniMax-M2", ROUTER),
    _supported("solar_open", "Solar Open", EXPERTS),
    _supported("sarvam_moe", "Sarvam 30B", EXPERTS),
    _supported("phimoe", "Phi-3.5-MoE", WINDOW, ROUTER),
    _supported("llama4_text", "Llama 4 (text)", CHUNKS, TEMPERATURE, EXPERTS),
    _supported("qwen3_next", "Qwen3-Next", DELTA, ROUTER),
    _supported("qwen3_5_text", "Qwen3.5, Qwen3.6 (text)", DELTA),
    _supported("qwen3_5_moe_text", "Qwen3.5-MoE, Qwen3.6-MoE (text)", DELTA, ROUTER),
    _supported("olmo_hybrid", "OLMo Hybrid", DELTA),
    _supported("lara_mini", "Lara 4 Mini", DELTA, WINDOW, ROUTER),
    _supported("kimi_linear", "Kimi Linear", DELTA, LATENT, EXPERTS),
    _supported("bailing_hybrid", "Ling 3 (hybrid)", DELTA, LATENT, EXPERTS),
    _supported("bamba", "Bamba", STATE_SPACE),
    _supported("granitemoehybrid", "Granite 4", STATE_SPACE, ROUTER, logits=GRANITE_LOGITS),
    _supported("nemotron_h", "Nemotron-H", STATE_SPACE, EXPERTS),
    _supported("falcon_h1", "Falcon-H1", STATE_SPACE, logits=FALCON_LOGITS),
    _supported("zamba2", "Zamba 2", STATE_SPACE),
    _supported("lfm2", "LFM2", CONVOLUTION),
    _supported("lfm2_moe", "LFM2-MoE", CONVOLUTION, EXPERTS),
    _supported("lfm3", "LFM3", CONVOLUTION, WINDOW),
    *_refused(
        "each layer has two attentions, and what a step takes and sends is predicted for one",
        {"longcat_flash": "LongCat-Flash"},
    ),
    *_refused(
        "an indexer picks the keys of each token, and a rank has those of its own tokens alone: "
        "past this refusal a tiny model on 2 ranks misses more than half of the picks, its loss is "
        "more than 1 % off and gradients more than 100 %",
        {"deepseek_v32": "DeepSeek-V3.2", "glm_moe_dsa": "GLM-5"},
    ),
    *_refused(
        f"with images its model is not compared with one process; {TEXT_IN_IT}",
        {
            "llama4": "Llama 4",
        },
    ),
    *_refused(
        "it reads images or sound too; train its text model (gemma3n_text)",
        {"gemma3n": "Gemma 3n"},
    ),
    *REFUSED,
)
"""Supported families first, then refused ones, grouped by reason."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in TABLE if family.refusal is None}
)
"""model_type -> family, of what can be patched."""

NOT_PROVEN = "not compared with one process, so not proven to be exact"
"""Why a model type that the table does not name is refused."""


def refusal_of(model_type: str) -> str | None:
    """Why this model type can't be patched, or None."""
    if model_type in FAMILIES:
        return None
    named = (family for family in TABLE if family.model_type == model_type)
    return next((family.refusal for family in named), NOT_PROVEN)
