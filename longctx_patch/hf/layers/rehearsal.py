"""A training step with a model's last layers only, and what it takes; for `preflight.py`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longctx_patch.memory.ladder import Extra
from longctx_patch.memory.meter import Meter
from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.memory.run_layer import run_layer

NUM_LAYERS = 3


class Seen(NamedTuple):
    """Bytes of the device, in the step with few layers."""

    loss_peak: int
    """Until backward came to the layers."""
    layers_peak: int
    """From there on."""
    gradient_bytes: int
    """Of those that there were."""


class Rehearsal:
    """Runs the last layers under policies of their own, and hidden states past the others."""

    def __init__(
        self,
        policies: tuple[LayerPolicy, ...],
        num_layers: int,
        meter: Meter,
        host: HostCopies,
        share: float,
    ) -> None:
        """`share` of the tokens have their attention kept; `host` is for what is offloaded."""
        self.policies, self.host = policies, host
        self._meter, self._share = meter, share
        self._first = num_layers - NUM_LAYERS
        self._before: list[int] = []
        self._after: list[int] = []
        self._gone: list[int] = []
        self._loss_peak = 0

    def step(
        self,
        loss_of: Callable[[], Tensor],
        backward: Callable[[Tensor], object],
        trained: Sequence[nn.Parameter],
    ) -> Seen:
        """Forward and backward; gradients stay. Raises ValueError but for one forward pass."""
        self._meter.reset_peak()
        loss = loss_of()
        forward_peak = self._meter.peak()
        self._meter.reset_peak()
        if len(self._before) != NUM_LAYERS:
            raise ValueError(
                f"preflight(): loss_of ran {len(self._before)} of the last {NUM_LAYERS} layers: "
                "give one forward pass in training. Where one backward goes through several, leave "
                "preflight out: checkpoint='auto' measures by itself."
            )
        backward(loss)
        gradients = (parameter.grad for parameter in trained if parameter.grad is not None)
        return Seen(
            max(forward_peak, self._loss_peak),
            self._meter.peak(),
            sum(num_bytes_on(self.host.device, grad) for grad in gradients),
        )

    def run(self, layer: int, forward: Callable[..., Tensor], *args: Tensor) -> Tensor:
        if layer < self._first:
            return args[0]
        if not torch.is_grad_enabled():  # of a reference, say: nothing is kept
            return forward(*args)
        self._before.append(self._meter.allocated())
        on_host = self.host.num_bytes
        policy = self.policies[layer - self._first]
        out: Tensor = run_layer(policy, forward, *args, host=self.host, share=self._share)
        self._after.append(self._meter.allocated())
        self._gone.append(self.host.num_bytes - on_host)
        if layer == self._first + NUM_LAYERS - 1 and out.requires_grad:
            out.register_hook(self._comes_to_the_layers)
        return out

    def _comes_to_the_layers(self, _: Tensor) -> None:
        self._loss_peak = self._meter.peak()
        self._meter.reset_peak()

    @property
    def kept_bytes(self) -> int:
        """From the second of them beginning to the last: its own, and what it gave on. As the first
        begins, FSDP still has a buffer of the embeddings."""
        return max(0, self._before[2] - self._before[1])

    @property
    def stayed_bytes(self) -> int:
        """Of those that were to leave, for want of room on the host."""
        return self.kept_bytes if self.host.is_full else 0

    @property
    def extra_bytes(self) -> Extra:
        """What a layer keeps on each rung beyond the one below, where they are of several."""
        if self.policies[0] == self.policies[-1]:
            return Extra(0, 0)
        attention = self._gone[1] + self.stayed_bytes
        lower = attention + self.kept_bytes - self.stayed_bytes
        return Extra(attention, max(0, self._after[2] - self._before[2] - lower))


def num_bytes_on(device: torch.device, tensor: Tensor) -> int:
    """Of this rank's shard, as far as it is on the device."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.nbytes) if local.device.type == device.type else 0
