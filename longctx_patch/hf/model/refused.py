"""Families that are refused for what their own code does.

Each reason was found by running a tiny model of the family: `benchmarks/survey_families.py` builds
one of every causal language model that transformers knows, patches it as if it were supported, and
compares it with its stock self.
"""

from longctx_patch.hf.model.family import Family, refused
from longctx_patch.hf.model.refused_seeing import SEEING

REFUSED: tuple[Family, ...] = (
    *refused(
        "its scan (Mamba-1) is affine in its state, but no code here hands that state from rank to "
        "rank, so that it would start anew on each",
        {
            "mamba": "Mamba",
            "falcon_mamba": "Falcon Mamba",
            "jamba": "Jamba",
            "zamba": "Zamba",
        },
    ),
    *refused(
        "its recurrence (RG-LRU) is affine in its state, but runs in a loop of the layer's own, "
        "which gives no place to hand that state on",
        {"recurrent_gemma": "RecurrentGemma"},
    ),
    *refused(
        "its recurrence (RWKV-4) is affine in its two sums, but it and the mix with the token "
        "before are code of the layer's own, which gives no place to hand them on",
        {"rwkv": "RWKV"},
    ),
    *refused(
        "its recurrence (mLSTM, the only one of xLSTM that transformers has) is affine in its "
        "state, but rescaled by a running maximum that no code here hands on",
        {"xlstm": "xLSTM"},
    ),
    *refused(
        "its linear attention (lightning) is affine in its state, but code of the layer's own, "
        "which gives no place to hand that state on",
        {"minimax": "MiniMax-Text-01"},
    ),
    *refused(
        "it has no attention, whose heads degrees, plans and memory are counted in",
        {"mamba2": "Mamba 2"},
    ),
    *refused(
        "an indexer picks the keys or blocks of each token from the local ones",
        {
            "axk2": "A.X K2",
            "dots3_note_text": "dots3 (text)",
            "hy_v4": "Hunyuan 4 (Hy4)",
            "minimax_m3_vl_text": "MiniMax-M3 (text)",
        },
    ),
    *refused(
        "keys are compressed over blocks of neighbouring tokens, which reach over a shard's edge",
        {"deepseek_v4": "DeepSeek-V4"},
    ),
    *refused(
        "its attention adds a bias for each pair of tokens to the scores, which no kernel takes",
        {
            "inkling_text": "Inkling (text)",
            "inkling2_text": "Inkling 2 (text)",
            "inkling2_loop_text": "Inkling 2 Loop (text)",
        },
    ),
    *refused(
        "an indexer picks blocks of keys, and embeddings and convolutions of n-grams are computed, "
        "from the local tokens",
        {"qwen4_exp_text": "Qwen4-Exp (text)"},
    ),
    *refused(
        "queries, keys and values are mixed with those of tokens before by code of the layer's "
        "own, which reads the local tokens alone",
        {"zaya": "ZAYA1"},
    ),
    *refused(
        "attention runs more than once in each layer of a pass, and the check of the first step "
        "counts once",
        {"diffllama": "DiffLlama", "dory": "Nemotron Dory", "hrm_text": "HRM-Text"},
    ),
    *refused(
        "its attention computes a mask of its own from the keys of the local tokens",
        {"doge": "Doge"},
    ),
    *refused(
        "its sizes lie in configs within its config, which the checks don't read",
        {"dbrx": "DBRX"},
    ),
    *refused(
        "its learned positions end at the pretrained length, so there are no longer rows to train "
        "on",
        {
            "biogpt": "BioGPT",
            "gpt-sw3": "GPT-SW3",
            "gpt2": "GPT-2",
            "gpt_bigcode": "StarCoder, SantaCoder",
            "opt": "OPT",
        },
    ),
    *refused(
        "its model hands its layers no further arguments, so that they can't know of shards",
        {
            "bloom": "BLOOM",
            "cpmant": "CPM-Ant",
            "modernbert-decoder": "Ettin, ModernBERT (decoder)",
            "mpt": "MPT",
        },
    ),
    *refused(
        "its attention is its own code, not transformers' attention registry",
        {
            "ctrl": "CTRL",
            "falcon": "Falcon",
            "gpt_neo": "GPT-Neo",
            "gpt_neox_japanese": "GPT-NeoX Japanese",
            "openai-gpt": "GPT (2018)",
            "reformer": "Reformer",
            "xglm": "XGLM",
            "xlm": "XLM",
            "xlnet": "XLNet",
        },
    ),
    *refused(
        "its attention goes through transformers' attention registry since 5.24 alone, and was its "
        "own code in older versions",
        {"codegen": "CodeGen", "gptj": "GPT-J"},
    ),
    *refused(
        "it reads bytes and attends to patches of them that another model cuts",
        {"blt": "Byte Latent Transformer (BLT)"},
    ),
    *refused(
        "an encoder: tokens see later ones, unless its config says is_decoder",
        {
            "bert": "BERT",
            "bert-generation": "BERT (generation)",
            "big_bird": "BigBird",
            "camembert": "CamemBERT",
            "data2vec-text": "Data2Vec (text)",
            "electra": "ELECTRA",
            "ernie": "ERNIE 1 to 3",
            "megatron-bert": "Megatron-BERT",
            "rembert": "RemBERT",
            "roberta": "RoBERTa",
            "roberta-prelayernorm": "RoBERTa-PreLayerNorm",
            "roc_bert": "RoCBert",
            "roformer": "RoFormer",
            "xlm-roberta": "XLM-RoBERTa",
            "xlm-roberta-xl": "XLM-RoBERTa-XL",
            "xmod": "X-MOD",
        },
    ),
    *refused(
        "half of an encoder-decoder model",
        {
            "bart": "BART",
            "bigbird_pegasus": "BigBird-Pegasus",
            "blenderbot": "Blenderbot",
            "blenderbot-small": "Blenderbot (small)",
            "marian": "Marian",
            "mbart": "mBART",
            "mvp": "MVP",
            "pegasus": "Pegasus",
            "plbart": "PLBart",
            "prophetnet": "ProphetNet",
            "trocr": "TrOCR",
            "whisper": "Whisper",
        },
    ),
    *refused(
        "it drafts tokens for another model, whose keys it reads",
        {
            "gemma4_assistant": "Gemma 4 (assistant)",
            "gemma4_unified_assistant": "Gemma 4 unified (assistant)",
        },
    ),
    *SEEING,
)
