"""Sizes of published models by their hub names, so that they can be planned without a network.

They are those of the text model where a checkpoint reads images too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from longctx_patch.config import HardwareName


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """What the config of one published model says."""

    hub_name: str
    sizes: Mapping[str, Any]
    """Fields of its config."""
    measured_on: tuple[HardwareName, ...] = ()
    """GPUs on which steps of layers of these sizes were compared with their predictions
    (docs/results/planner_runs.toml)."""

    @property
    def name(self) -> str:
        """The hub name without its owner."""
        return self.hub_name.partition("/")[2]

    def config(self) -> Any:
        """The model's config, as far as predictions look at it."""
        from transformers import AutoConfig

        return AutoConfig.for_model(**self.sizes, dtype="bfloat16", use_cache=False)


def _sizes(
    model_type: str, hidden: int, inner: int, layers: int, heads: tuple[int, int], vocabulary: int
) -> dict[str, Any]:
    """Fields of a config; `heads`: of queries, and of keys and values."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


_TIED = {"tie_word_embeddings": True}
_HEADS_OF_128 = {"head_dim": 128}
_NO_WINDOW = {"sliding_window": None}
_GEMMA = _TIED | {"sliding_window": 1024}


def _model(hub_name: str, sizes: Mapping[str, Any], *measured_on: HardwareName) -> NamedModel:
    return NamedModel(hub_name=hub_name, sizes=sizes, measured_on=measured_on)


def _qwen3(hidden: int, inner: int, layers: int, heads: tuple[int, int]) -> dict[str, Any]:
    return _sizes("qwen3", hidden, inner, layers, heads, 151936) | _HEADS_OF_128


def _gemma3(hidden: int, inner: int, layers: int, heads: tuple[int, int]) -> dict[str, Any]:
    return _sizes("gemma3_text", hidden, inner, layers, heads, 262208) | _GEMMA


_MODELS = (
    _model("meta-llama/Llama-3.1-8B", _sizes("llama", 4096, 14336, 32, (32, 8), 128256), "h200"),
    _model("meta-llama/Llama-3.1-70B", _sizes("llama", 8192, 28672, 80, (64, 8), 128256)),
    _model("Qwen/Qwen3-0.6B", _qwen3(1024, 3072, 28, (16, 8)) | _TIED),
    _model("Qwen/Qwen3-1.7B", _qwen3(2048, 6144, 28, (16, 8)) | _TIED),
    _model("Qwen/Qwen3-4B", _qwen3(2560, 9728, 36, (32, 8)) | _TIED),
    _model("Qwen/Qwen3-8B", _qwen3(4096, 12288, 36, (32, 8)), "h200"),
    _model("Qwen/Qwen3-14B", _qwen3(5120, 17408, 40, (40, 8))),
    _model("Qwen/Qwen3-32B", _qwen3(5120, 25600, 64, (64, 8))),
    _model(
        "Qwen/Qwen3-30B-A3B",
        _sizes("qwen3_moe", 2048, 6144, 48, (32, 4), 151936)
        | _HEADS_OF_128
        | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        "h200",
    ),
    _model(
        "Qwen/Qwen3.5-9B",
        _sizes("qwen3_5_text", 4096, 12288, 32, (16, 4), 248320) | {"head_dim": 256},
        "h100",
    ),
    _model(
        "Qwen/Qwen3.5-35B-A3B",
        _sizes("qwen3_5_moe_text", 2048, 512, 40, (16, 2), 248320)
        | {"head_dim": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
        | {"num_experts": 256, "num_experts_per_tok": 8},
        "h200",
    ),
    _model(
        "mistralai/Mistral-7B-v0.3",
        _sizes("mistral", 4096, 14336, 32, (32, 8), 32768) | _NO_WINDOW,
        "h200",
    ),
    _model(
        "mistralai/Mistral-Small-24B-Base-2501",
        _sizes("mistral", 5120, 32768, 40, (32, 8), 131072) | _HEADS_OF_128 | _NO_WINDOW,
    ),
    _model("google/gemma-3-4b-pt", _gemma3(2560, 10240, 34, (8, 4)) | {"head_dim": 256}),
    _model("google/gemma-3-12b-pt", _gemma3(3840, 15360, 48, (16, 8)) | {"head_dim": 256}),
    _model("google/gemma-3-27b-pt", _gemma3(5376, 21504, 62, (32, 16)) | _HEADS_OF_128),
    _model(
        "openai/gpt-oss-20b",
        _sizes("gpt_oss", 2880, 2880, 24, (64, 8), 201088)
        | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
    _model(
        "HuggingFaceTB/SmolLM2-135M", _sizes("llama", 576, 1536, 30, (9, 3), 49152) | _TIED, "h100"
    ),
    _model("HuggingFaceTB/SmolLM2-1.7B", _sizes("llama", 2048, 8192, 24, (32, 32), 49152) | _TIED),
    _model("HuggingFaceTB/SmolLM3-3B", _sizes("smollm3", 2048, 11008, 36, (16, 4), 128256) | _TIED),
)

NAMED: Mapping[str, NamedModel] = MappingProxyType({model.hub_name: model for model in _MODELS})
"""The models of docs/reference/models.md, by their hub names."""
