"""Which of transformers' Auto classes makes a model of a config."""

from typing import Any

from longctx_patch.hf.model.text_part import TEXT_TYPES

_LISTED_WITH_IMAGES = frozenset({"mistral4"})
"""Families of text models that transformers does not make by AutoModelForCausalLM."""


def auto_class_name(config: Any) -> str:
    """The name of the class in transformers: whole models that read images have another one."""
    kinds = {*TEXT_TYPES, *_LISTED_WITH_IMAGES}
    return "AutoModelForImageTextToText" if config.model_type in kinds else "AutoModelForCausalLM"


def auto_class(config: Any) -> Any:
    """The class itself, for `from_config` and `from_pretrained`."""
    import transformers

    return getattr(transformers, auto_class_name(config))
