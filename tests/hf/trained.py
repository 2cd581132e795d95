"""A small patched model with a meter, an optimizer and one batch, to rehearse and to train."""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.hf.preflight import Preflight, preflight
from longctx_patch.memory.meter import Meter
from tests.hf.steps import collated
from tests.hf.tiny import VOCABULARY, tiny_model, token_rows

LAYERS, PLENTY = 7, 10**12


class Run:
    def __init__(
        self,
        meter: Meter | None,
        *,
        length: int,
        rows: int = 1,
        layers: int = LAYERS,
        vocab_size: int = VOCABULARY,
        shards: bool = False,
        **config: Any,
    ) -> None:
        """`shards`: FSDP2 over two ranks."""
        self.model: Any = tiny_model(num_hidden_layers=layers, vocab_size=vocab_size)
        self.handle: PatchHandle = patch(self.model, LongContextConfig(**config))
        self.handle._checkpoints.find_meter = lambda _: meter
        if shards:
            mesh = init_device_mesh("cpu", (2,))
            for layer in self.model.get_decoder().layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = AdamW(self.model.parameters(), foreach=False)
        self.load(length, rows)

    def load(self, length: int, rows: int = 1) -> None:
        self.batch = collated(self.handle, token_rows(length, rows))

    def loss(self) -> Tensor:
        return self.model(**self.batch).loss

    def rehearse(self, **options: Any) -> Preflight:
        found = preflight(self.handle, self.loss, **options)
        assert found is not None
        return found

    def step(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def letters(self) -> str:
        """Of each layer's policy, first to last."""
        return "".join(policy[0] for policy in self.handle.checkpointing.policies)
