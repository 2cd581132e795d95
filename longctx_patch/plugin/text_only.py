"""The text model of a checkpoint that reads images too, as a model of its own."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from longctx_patch.families.load_config import is_local, load_model_config, whole_config
from longctx_patch.families.stored_weights import differ_though_tied
from longctx_patch.families.text_part import TEXT_TYPES, text_weights
from longctx_patch.plugin.stored_check import check_loaded, model_without_memory


def text_model(
    model: str,
    *,
    config: Any = None,
    dtype: torch.dtype | None = None,
    allow_weights: Sequence[str] = (),
) -> Any:
    """The causal language model in a checkpoint that reads images too, in evaluation mode.

    On text it computes what the whole model does. `save_pretrained` writes it as a model of its
    own, which `AutoModelForCausalLM` loads; the image encoder stays in the checkpoint.

    Args:
        model: a folder or hub name, such as `Qwen/Qwen3-VL-8B-Instruct`.
        config: of the text model, in place of the one published with it.
        dtype: of the weights; default: the one that the config names.
        allow_weights: names, or patterns of names, of weights that may be missing or unexpected.

    Raises:
        ValueError: the checkpoint has no text model that is known here, or its weights are not
            those of its config.

    Example:
        >>> model = text_model("Qwen/Qwen3-VL-8B-Instruct", dtype=torch.bfloat16)  # doctest: +SKIP
    """
    published = whole_config(model)
    name = str(Path(model).expanduser()) if is_local(model) else model
    if published is None:
        raise ValueError(
            f"model {model!r} is no checkpoint with a text model in it, of type "
            f"{', '.join(TEXT_TYPES)}. Load it with AutoModelForCausalLM.from_pretrained."
        )
    config = copy.deepcopy(load_model_config(model) if config is None else config)
    dtype = dtype or config.dtype or torch.float32
    # transformers reads it as what it was written as, whatever its weights are called.
    whole, info = AutoModelForImageTextToText.from_pretrained(
        name, config=published, dtype=dtype, output_loading_info=True, trust_remote_code=False
    )
    check_loaded(model, info, allow_weights)
    text = model_without_memory(config, dtype)
    weights = text_weights(whole.state_dict())
    for name, other in text.all_tied_weights_keys.items():
        if not torch.equal(weights[name], weights[other]):  # which transformers leaves so
            raise differ_though_tied(f"model {model!r}", (other, name))
    text.load_state_dict(weights, assign=True)
    text.tie_weights()
    text.generation_config = whole.generation_config
    text.config.name_or_path = text.name_or_path = whole.name_or_path
    return text.eval()
