"""Tiny models of every family, from configs, with two or three layers and four query heads."""

import copy
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from longctx_patch.families.family import IMAGES, RECURRENT
from longctx_patch.families.supported import FAMILIES as ALL
from longctx_patch.families.text_part import auto_class
from longctx_patch.verification.shrink import keep_float64
from tests.hf.features import FEATURES, SIZES, VOCABULARY

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense, causal families without a window, over which most tests run."""
UNHEARD = ("lfm2", "lfm2_moe") if Version(transformers.__version__) < Version("5.22") else ()
"""Families whose convolutions don't take the options of a call, and so are refused."""
SUPPORTED = {
    name: family
    for name, family in ALL.items()
    if name in CONFIG_MAPPING_NAMES and name not in UNHEARD and IMAGES not in family.features
}
"""model_type -> family, of those in the table of support that the installed transformers knows, but
for models that read images (`tests/hf/seeing.py`)."""

ONE_OF_EACH = list({family.features: name for name, family in SUPPORTED.items()}.values())
"""A family of each combination of features."""

_EXTRA: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 16}}


def router_weight(family: str) -> str:
    """The option that weighs the loss of a family's router."""
    return "aux_loss_coef" if family == "jetmoe" else "router_aux_loss_coef"


def tiny_config(family: str, **overrides: Any) -> Any:
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "attn_implementation": "sdpa",
    }
    values |= _EXTRA.get(family, {}) | overrides
    return AutoConfig.for_model(family, **copy.deepcopy(values))  # some tests change a config


def featured_config(family: str, **overrides: Any) -> Any:
    """A tiny config with the window, softcap, experts and more of its family; eager attention."""
    values = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    values |= {"head_dim": 16, "attn_implementation": "eager"}
    return tiny_config(family, **values | features_of(family) | overrides)


@cache
def features_of(family: str) -> dict[str, Any]:
    """Its own, and those of `SIZES` that its config has by default."""
    usual = CONFIG_MAPPING[family]().to_dict()
    return {k: size for k, size in SIZES.items() if usual.get(k)} | FEATURES.get(family, {})


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A model in training mode with the same weights in every process."""
    torch.manual_seed(0)
    config = tiny_config(family, **overrides)
    model = auto_class(config).from_config(config, dtype=dtype)
    if dtype == torch.float64:
        keep_float64(model)
    return model.train()


def featured_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A model with the same weights in every process. Unlike a fresh model's, norms aren't 1,
    biases and sinks aren't 0, and scores are so large that a softcap changes them."""
    torch.manual_seed(0)
    config = featured_config(family, **overrides)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.train()


def precise_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A featured model, in float64 if it has recurrent layers: the gradients of their decays are
    sums of products of which float32 keeps few digits."""
    model = featured_model(family, **overrides)
    if set(SUPPORTED[family].features) & set(RECURRENT):
        keep_float64(model)
    return model


def token_rows(length: int, num_rows: int = 2, seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (num_rows, length), generator=generator)
    return [{"input_ids": row} for row in rows.tolist()]


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean over all processes, as DDP reduces gradients; collective if there are several."""
    if not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()
