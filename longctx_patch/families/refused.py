"""Families that are refused for what their own code does, each with the reason.

Any other family that the table of support does not name is refused by `NOT_PROVEN`.
"""

from collections.abc import Mapping
from types import MappingProxyType

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
