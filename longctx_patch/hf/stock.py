"""What a model does with whole rows before it is patched."""

from transformers import PreTrainedModel

from longctx_patch.data.stock_rows import StockModel
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.facts import sees_absolute_positions

MASKED_WITHOUT_POSITIONS = ("afmoe", "gpt_oss")
"""Families whose masks transformers 5.17 to 5.23 makes without positions, so that packed documents
see each other."""


def stock_model(model: PreTrainedModel) -> StockModel:
    """Call it before attention is replaced."""
    reads_lengths = transformers_api.attention_implementation(model).startswith("flash")
    return StockModel(
        sees_absolute_positions=sees_absolute_positions(model.config),
        finds_documents=reads_lengths or model.config.model_type not in MASKED_WITHOUT_POSITIONS,
        takes_lengths=reads_lengths,
    )
