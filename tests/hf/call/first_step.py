"""First training steps of a patched model on two ranks, and the outcome of their check."""

from collections.abc import Callable, Iterable
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import nn

from longctx_patch import SequenceParallelismError
from longctx_patch.hf.model import transformers_api
from longctx_patch.memory.policies import CheckpointPolicy
from tests.hf.tiny import featured_model
from tests.memory.trained import Trained

LENGTH = 24
FINE = "fine"
Scenario = Callable[[int], None]


class Patched(Trained):
    """A patched model on two ranks."""

    def steps(self, count: int) -> None:
        """Forward and backward `count` times; gradients add up."""
        for _ in range(count):
            self.loss().backward()

    def attention(self, layer: int) -> Any:
        """The module in which tokens meet, which a recurrent layer has in place of attention."""
        return transformers_api.mixing_modules(self.handle.model)[layer][0]


def patched(
    family: str = "llama",
    policy: CheckpointPolicy = "none",
    *,
    ulysses: int = 1,
    lora: LoraConfig | None = None,
) -> Patched:
    model = featured_model(family)
    if lora is not None:
        model = with_adapter(model, lora)
    degrees: dict[str, Any] = {"ulysses_degree": ulysses, "ring_degree": 2 // ulysses}
    return Patched(model, length=LENGTH, checkpoint=policy, **degrees)


def with_adapter(model: Any, lora: LoraConfig) -> Any:
    """Wrap a model by PEFT. The second factor of its adapters begins at 1; at 0, the usual value,
    the first factor would have no gradient."""
    model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    return model


def outcome(scenario: Scenario, rank: int) -> str:
    try:
        scenario(rank)
    except SequenceParallelismError as error:
        return str(error)
    except Exception as error:
        return f"another error: {type(error).__name__}: {error}"
    return FINE


def outcomes_of(scenarios: Iterable[tuple[str, Scenario]], rank: int) -> dict[str, str]:
    return {name: outcome(scenario, rank) for name, scenario in scenarios}
