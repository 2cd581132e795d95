"""A training step with a model's last layers only, and what a step with all layers would take.

`longctx_patch.hf.preflight` runs it. All numbers of bytes are of this process's device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from traceback import clear_frames
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longctx_patch.hf.layers.checkpointing import LayerCheckpoints
from longctx_patch.memory.ladder import Extra, Rehearsed
from longctx_patch.memory.meter import Meter
from longctx_patch.memory.random_state import RandomState
from longctx_patch.memory.run_layer import run_layer

NUM_LAYERS = 3


class WillNotFit(RuntimeError):
    """A step would not fit into the memory of a GPU."""


class Seen(NamedTuple):
    """Holds what the step with few layers took."""

    loss_peak: int
    """Peak until backward reached the layers."""
    layers_peak: int
    """Peak from then on."""
    gradient_bytes: int
    """Bytes of the gradients at the end."""


class Rehearsal:
    """Runs the last layers under policies of their own, and hands hidden states past the others."""

    def __init__(self, checkpoints: LayerCheckpoints, device: torch.device, meter: Meter) -> None:
        self.policies = checkpoints.to_rehearse(NUM_LAYERS, device)
        self.host = checkpoints.host_to_rehearse(device)
        self.num_layers = len(checkpoints.policies)
        self._checkpoints, self._meter = checkpoints, meter
        self._first = self.num_layers - NUM_LAYERS
        self._before: list[int] = []
        self._after: list[int] = []
        self._bytes_to_host: list[int] = []
        self._loss_peak = 0

    def step(
        self,
        loss_of: Callable[[], Tensor],
        backward: Callable[[Tensor], object],
        trained: Sequence[nn.Parameter],
    ) -> Seen:
        """Run forward and backward; random numbers and gradients are afterwards as they were.

        Raises WillNotFit if even these layers run out of memory, and ValueError unless `loss_of`
        runs forward through them once.
        """
        random = RandomState.now(self.host.device)
        try:
            with random.replayed(), self._checkpoints.rehearsed(self.run):
                return self._step(loss_of, backward, trained)
        except torch.OutOfMemoryError as error:
            clear_frames(error.__traceback__)  # else they hold the step while the error is shown
            few = f"{NUM_LAYERS} of {self.num_layers} layers do not fit"
            raise WillNotFit(f"{few}: {error}") from error
        finally:
            for parameter in trained:
                parameter.grad = None

    def _step(
        self,
        loss_of: Callable[[], Tensor],
        backward: Callable[[Tensor], object],
        trained: Sequence[nn.Parameter],
    ) -> Seen:
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
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        return Seen(
            max(forward_peak, self._loss_peak),
            self._meter.peak(),
            num_bytes_on(self.host.device, gradients),
        )

    def run(self, layer: int, forward: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Run one layer's forward, or pass its input on if the layer is left out."""
        if layer < self._first:
            return args[0]
        if not torch.is_grad_enabled():  # a reference model's, say: nothing is kept
            return forward(*args)
        self._before.append(self._meter.allocated())
        on_host = self.host.num_bytes
        policy, share = self.policies[layer - self._first], self._checkpoints.share
        out: Tensor = run_layer(policy, forward, *args, host=self.host, share=share)
        self._after.append(self._meter.allocated())
        self._bytes_to_host.append(self.host.num_bytes - on_host)
        if layer == self._first + NUM_LAYERS - 1 and out.requires_grad:
            out.register_hook(self._backward_reaches_layers)
        return out

    def _backward_reaches_layers(self, _: Tensor) -> None:
        self._loss_peak = self._meter.peak()
        self._meter.reset_peak()

    @property
    def chooses_by_layer(self) -> bool:
        """Says whether layers were rehearsed under different policies, as `auto` has them."""
        return self.policies[0] != self.policies[-1]

    @property
    def kept_bytes(self) -> int:
        """Returns what a layer keeps, its output included. Measured on the second of the three
        layers, because FSDP still has a buffer of the embeddings when the first one begins."""
        return max(0, self._before[2] - self._before[1])

    @property
    def stayed_bytes(self) -> int:
        """Bytes that a layer should have offloaded but kept, because the host had no room."""
        return self.kept_bytes if self.host.is_full else 0

    @property
    def extra_bytes(self) -> Extra:
        """Returns what a layer keeps on each of several rungs beyond the one below."""
        if not self.chooses_by_layer:
            return Extra(0, 0)
        attention = self._bytes_to_host[1] + self.stayed_bytes
        lower = attention + self.kept_bytes - self.stayed_bytes
        return Extra(attention, max(0, self._after[2] - self._before[2] - lower))

    def layers_with_room(self, held_bytes: int) -> int:
        """The number of layers for which the host has room, if a run holds `held_bytes` of it."""
        attention = self.extra_bytes.attention
        if not attention:
            return self.num_layers
        room = self.host.bytes_with_room + self.host.num_bytes + held_bytes
        return min(self.num_layers, room // attention)


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """Predicts what a step with all layers takes, judged by the step with few."""

    rehearsal: Rehearsal
    seen: Seen
    host_layers: int
    """The number of layers for which the host has room."""
    trained_bytes: int
    """Bytes of the weights that are trained."""
    state_bytes: int
    """Bytes of optimizer states that are not allocated yet."""
    has_gradients: bool = False
    """Whether all gradients are there already, as in all forwards of a step but the first."""

    @property
    def loss_bytes(self) -> int:
        """Peak until backward reaches the layers, with the last layer on the lowest rung."""
        before = self.seen.loss_peak + (self.trained_bytes if self.has_gradients else 0)
        return before - self._last_layer_bytes + self._kept_by_others + self.state_bytes

    @property
    def backward_bytes(self) -> int:
        """Peak once backward has reached the layers; with `has_gradients` a bound, since those of
        the rehearsed layers are in the peak that was seen, too."""
        gradients_to_come = max(0, self.trained_bytes - self.seen.gradient_bytes)
        more = max(self._kept_by_others, gradients_to_come)
        if self.has_gradients:
            more = self._kept_by_others + self.trained_bytes
        return self.seen.layers_peak + more + self.state_bytes

    def known(self, allocated_bytes: int) -> Rehearsed:
        """Returns what `auto` need not measure where tensors hold `allocated_bytes` now."""
        return Rehearsed(
            extra_bytes=self.rehearsal.extra_bytes,
            host_layers=self.host_layers,
            peak_bytes=max(self.backward_bytes, self.loss_bytes + self._last_layer_bytes),
            rest_bytes=allocated_bytes + self.state_bytes,
        )

    @property
    def _last_layer_bytes(self) -> int:
        """Returns what the last layer kept in the rehearsal and need not keep."""
        extra, has_room = self.rehearsal.extra_bytes, self.host_layers >= self.rehearsal.num_layers
        return extra.none + (extra.attention if has_room else 0)

    @property
    def _kept_by_others(self) -> int:
        """Returns what the layers that were not rehearsed keep on the device.

        What has no room on the host stays there. The last layer is counted elsewhere, and what
        stayed on the device in the rehearsal is in its peak already.
        """
        rehearsal = self.rehearsal
        without_room = max(0, rehearsal.num_layers - 1 - self.host_layers)
        staying = without_room * rehearsal.extra_bytes.attention
        stayed = rehearsal.stayed_bytes
        left = (rehearsal.num_layers - NUM_LAYERS) * (rehearsal.kept_bytes - stayed)
        return max(0, left + staying - stayed)


def num_bytes_on(device: torch.device, tensors: Sequence[Tensor]) -> int:
    """Bytes of this rank's shards of the tensors, as far as they are on the device."""
    shards = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(int(shard.nbytes) for shard in shards if shard.device.type == device.type)
