"""Checkpoints in 8-bit floating point, which are made to be served and not to be trained."""

from pathlib import Path
from typing import Any

from longctx_patch.families.load_config import is_bare_config, whole_config
from longctx_patch.families.text_part import auto_class_name

FP8_METHODS = frozenset({"fp8", "fbgemm_fp8"})


def check_not_fp8(model: str, config: Any) -> None:
    """Refuse FP8 weights, and say how they are written in bfloat16.

    No gradients pass through their kernels on GPUs, and what was trained would be saved beside a
    config that calls it FP8.

    Args:
        model: hub name or local folder.
        config: of the model, or of its text model.
    """
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method not in FP8_METHODS:
        return
    is_whole = not is_bare_config(model) and whole_config(model) is not None
    kind = "AutoModelForImageTextToText" if is_whole else auto_class_name(config)
    name = f"{Path(model).name}-bf16"
    raise ValueError(
        f"model {model!r} has weights in 8-bit floating point (quantization_config with "
        f"quant_method {method!r} in its config.json), which can be served but not trained. Take "
        "its checkpoint in bfloat16, or write one and put the tokenizer beside it: "
        f"{kind}.from_pretrained({model!r}, dtype=torch.bfloat16, quantization_config="
        f"transformers.FineGrainedFP8Config(dequantize=True)).save_pretrained({name!r})."
    )
