"""A small patched model with an optimizer, for rehearsals and training."""

from typing import Any

from torch import Tensor
from torch.optim import AdamW

from longctx_patch.hf.preflight import Preflight, preflight
from tests.hf.tiny import tiny_model
from tests.memory.live_bytes import LiveBytes
from tests.memory.trained import Trained

LAYERS, PLENTY = 7, 10**12


class Run(Trained):
    def __init__(
        self,
        meter: LiveBytes | None,
        *,
        model: Any = None,
        checkpoint: Any = "none",
        shards: bool = False,
        **options: Any,
    ) -> None:
        """`shards`: wrap the model by FSDP2 over all ranks."""
        model = model or tiny_model(num_hidden_layers=LAYERS)
        super().__init__(model, meter=meter, checkpoint=checkpoint, **options)
        if shards:
            self.shard()
        self.optimizer = AdamW(model.parameters(), lr=1e-4, foreach=False)

    def rehearse(self, **options: Any) -> Preflight:
        found = preflight(self.handle, self.loss, **options)
        assert found is not None
        return found

    def train(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def letters(self) -> str:
        """The first letter of each layer's policy, first layer to last."""
        return "".join(policy[0] for policy in self.handle.checkpointing.policies)
