"""Patched models whose MLPs are in tiles, and the comparison of what they compute."""

from typing import Any

from peft import LoraConfig
from torch import Tensor

from longctx_patch import LongContextConfig, PatchHandle, SequenceShardCollator, patch
from tests.hf.tiny import gradients, token_rows
from tests.reference import relative_error

Gradients = dict[str, Tensor]


def assert_near(found: Gradients, wanted: Gradients, bound: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    assert len(found) > 1
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert relative_error(found[name], tensor) < bound, name


class Trained:
    """A patched model and its batches."""

    def __init__(self, model: Any, num_tiles: int | None, **config: Any) -> None:
        self.model = model
        self.handle: PatchHandle = patch(model, LongContextConfig(mlp_tiles=num_tiles, **config))
        self.collate = SequenceShardCollator(
            self.handle.config, group_rank=self.handle.group_rank, pad_token_id=0
        )

    def loss(self, length: int = 31, *, seed: int = 0) -> Tensor:
        return self.model(**self.collate(token_rows(length, seed=seed)), use_cache=False).loss

    def step(self, length: int = 31, *, seed: int = 0) -> Gradients:
        loss = self.loss(length, seed=seed)
        loss.backward()
        grads = gradients(self.model)
        self.model.zero_grad()
        return {"loss": loss.detach(), **grads}


def adapter(**options: Any) -> LoraConfig:
    targets = ["q_proj", "gate_proj", "down_proj"]
    return LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)
