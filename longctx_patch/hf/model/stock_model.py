"""Describes what a model does with whole rows before it is patched."""

from typing import Any

from transformers import PreTrainedModel

from longctx_patch.data.stock_rows import StockModel
from longctx_patch.families.facts import ModelFacts, sees_absolute_positions, text_config
from longctx_patch.hf.model import transformers_api

NORMED_AFTER_ROPE = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Families that weigh the numbers of a head after they are rotated, which their distances alone no
longer decide."""
MASKED_WITHOUT_POSITIONS = ("afmoe", "gpt_oss")
"""Families whose masks transformers 5.17 to 5.24 makes without positions, so that packed documents
see each other."""

BEFORE_CONVOLUTIONS = ("in_proj", "q_proj", "k_proj", "v_proj")
"""How the names begin of the projections that a recurrent layer's short convolution reads."""


def stock_model(model: PreTrainedModel) -> StockModel:
    """Call it before attention is replaced."""
    reads_lengths = transformers_api.attention_implementation(model).startswith("flash")
    return StockModel(
        sees_absolute_positions=model.config.model_type in NORMED_AFTER_ROPE
        or sees_absolute_positions(text_config(model.config)),
        finds_documents=reads_lengths or model.config.model_type not in MASKED_WITHOUT_POSITIONS,
        counts_rows_from=_counts_rows_from(model.config),
        takes_lengths=reads_lengths,
    )


def input_bias(model: PreTrainedModel) -> str | None:
    """The bias of a projection in front of a short convolution, an adapter's included.

    transformers zeroes padding before that projection, so on the left of a row its convolution sees
    the bias where the row's own begins with zeros.
    """
    for mixer in transformers_api.recurrent_modules(model):
        for name, _ in mixer.named_parameters():
            first, _, last = name.partition(".")
            if first.startswith(BEFORE_CONVOLUTIONS) and last.endswith("bias"):
                return f"{type(mixer).__name__}.{name}"
    return None


def _counts_rows_from(config: Any) -> int | None:
    """The least length of a row in which it matters that Llama 4 counts from the row's start: a
    second chunk, or a query whose temperature is not 1."""
    lengths = {layer.chunk + 1 for layer in ModelFacts.of(config).layers if layer.chunk}
    if getattr(config, "attn_temperature_tuning", False):
        lengths.add(config.floor_scale)
    return min(lengths, default=None)
