"""Hugging Face models."""

from longctx_patch.hf.families import FAMILIES, UnsupportedModelError, check_model_config
from longctx_patch.hf.patching import PatchHandle, patch

__all__ = ["FAMILIES", "PatchHandle", "UnsupportedModelError", "check_model_config", "patch"]
