"""Describes a family in the table of support, and what it may have beside causal attention.

This file imports no other module of the project, no torch and no transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

WINDOW, SOFTCAP, SINKS = "sliding window", "softcap", "sinks"
CHUNKS, TEMPERATURE = "chunked attention", "temperature by position"
LATENT = "latent attention"
"""MLA: keys and values are expanded from a latent of each token, and have different head sizes."""
IMAGES = "images"
"""Images among the tokens, embedded before rows are cut (`hf/call/image_rows.py`)."""
EXPERTS, ROUTER = "experts", "router loss"
"""Families with a router loss have experts too; `EXPERTS` stands where there is no such loss."""

DELTA, STATE_SPACE, CONVOLUTION = "gated delta rule", "Mamba-2", "short convolutions"
RECURRENT = (DELTA, STATE_SPACE, CONVOLUTION)
"""Layers along the sequence that run over a chain (`longctx_patch.plans.chain`)."""

LAYERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        CHUNKS: frozenset({"chunked_attention"}),
        DELTA: frozenset({"linear_attention"}),
        STATE_SPACE: frozenset({"linear_attention", "mamba", "hybrid", "attention", "mlp", "moe"}),
        CONVOLUTION: frozenset({"conv"}),
    }
)
"""Kinds of layers, as configs name them, that a feature covers beside attention."""


@dataclass(frozen=True, kw_only=True)
class LogitsRule:
    """Describes what a model's forward does to logits after its head: one number, one operation."""

    operation: Literal["softcap", "multiply", "divide"]
    """`softcap` is c * tanh(logits / c), left out where the number is None."""
    holder: Literal["config", "model"]
    """The object that has the number as an attribute."""
    attribute: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table of support."""

    model_type: str
    """As transformers spells it in config.json."""
    name: str
    """What people call it."""
    features: tuple[str, ...] = ()
    """What is covered beside causal attention; the model may or may not have it."""
    logits: LogitsRule | None = None
    """What happens to logits after the head; None: nothing."""

    @property
    def layers(self) -> frozenset[str]:
        """Kinds of layers, beside those of attention, that are covered."""
        return frozenset().union(*(LAYERS.get(feature, ()) for feature in self.features))


def supported(
    model_type: str, name: str, *features: str, logits: LogitsRule | None = None
) -> Family:
    return Family(model_type=model_type, name=name, features=features, logits=logits)
