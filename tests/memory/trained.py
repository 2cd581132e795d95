"""Patched models to train: under policies that are forced on layers, with a meter, in tiles."""

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from longctx_patch import LongContextConfig, PatchHandle, SequenceShardCollator, patch
from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.memory.run_layer import run_layer
from tests.hf.tiny import gradients, token_rows
from tests.memory.live_bytes import LiveBytes
from tests.reference import relative_error

Gradients = dict[str, Tensor]
"""The loss of a step, and the gradient of each parameter by its name."""


class Forced:
    """Stands in for `AutoPolicy`, and gives each layer the policy that it was told."""

    use = None

    def __init__(self, policies: Sequence[LayerPolicy]) -> None:
        self.policies = tuple(policies)
        self.host = HostCopies(torch.device("cpu"))

    def propose(self, num_tokens: int) -> int:
        return 0

    def begin(self, num_tokens: int, whole: int) -> None:
        return None

    def run(self, layer: int, forward: Any, *args: Any) -> Any:
        return run_layer(self.policies[layer], forward, *args, host=self.host)


class Trained:
    """A patched model and its batches of two rows."""

    def __init__(
        self,
        model: Any,
        *,
        length: int = 48,
        meter: LiveBytes | None = None,
        forced: Sequence[LayerPolicy] = (),
        **config: Any,
    ) -> None:
        """With a `meter` or `forced` policies it is `auto`, unless `config` names a policy."""
        self.model, self.length = model, length
        policy: dict[str, Any] = {"checkpoint": "auto"} if forced or meter else {}
        self.handle: PatchHandle = patch(model, LongContextConfig(**policy | config))
        self.handle._checkpoints.find_meter = lambda device: meter
        if forced:
            self.force(forced)
        self.collate = SequenceShardCollator(
            self.handle.config, group_rank=self.handle.group_rank, pad_token_id=0
        )

    def force(self, policies: Sequence[LayerPolicy]) -> None:
        """Give the layers these policies from the next pass on."""
        self.handle._checkpoints._auto = Forced(policies)  # type: ignore[assignment]

    def loss(self, length: int | None = None, *, seed: int = 0) -> Tensor:
        batch = self.collate(token_rows(length or self.length, seed=seed))
        return self.model(**batch, use_cache=False).loss

    def step(self, length: int | None = None, *, seed: int = 0) -> Gradients:
        """Loss and gradients, which are gone from the model afterwards."""
        loss = self.loss(length, seed=seed)
        loss.backward()
        grads = gradients(self.model)
        self.model.zero_grad()
        return {"loss": loss.detach(), **grads}

    def peak(self, meter: LiveBytes) -> int:
        """Bytes that a pass takes beyond those that rest."""
        rest = meter.allocated()
        meter.reset_peak()
        self.loss().backward()
        self.model.zero_grad()
        return meter.peak() - rest


def tiled(model: Any, num_tiles: int | None, **config: Any) -> Trained:
    """A patched model whose MLPs are in tiles of rows with a prime number of tokens."""
    return Trained(model, length=31, mlp_tiles=num_tiles, **config)


def adapter(**options: Any) -> LoraConfig:
    targets = ["q_proj", "gate_proj", "down_proj"]
    return LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)


def assert_equal(found: Gradients, wanted: Gradients) -> None:
    """To the bit."""
    assert found.keys() == wanted.keys()
    assert len(found) > 1
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_near(found: Gradients, wanted: Gradients, bound: float = 1e-6) -> None:
    """To rounding, in the same dtypes."""
    assert found.keys() == wanted.keys()
    assert len(found) > 1
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert relative_error(found[name], tensor) < bound, name
