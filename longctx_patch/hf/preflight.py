"""Will a step fit? Found out with three layers of the true shape, before the first step.

The whole model's forward and backward run on a real batch, but of the decoder's layers the last
three only: hidden states pass by the others. What the step with all layers needs follows from what
this one was seen to need:

    loss      peak of forward                    + other layers x what one keeps + optimizer
    backward  peak of backward                   + other layers x what one keeps + optimizer
    its end   peak of backward + gradients of the other layers                   + optimizer

and the largest must not exceed what this process may allocate. Under `checkpoint="auto"` layers are
offloaded for it, which is the least that it can do, but for the last one, which keeps everything:
so `auto` knows before the first step what each of its choices takes. It costs three layers of a
step; no weight, no gradient and no random number is other than before. FSDP2 gathers only the
layers that run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longctx_patch.hf.meeting import Meeting, meet
from longctx_patch.hf.patching import PatchHandle
from longctx_patch.memory import Extra, HostCopies, LayerPolicy, Meter, Rehearsed, run_layer
from longctx_patch.memory.random_state import RandomState

NUM_LAYERS = 3
ADAMW_STATES = 2
GIB = 2**30


class WillNotFit(RuntimeError):
    """A step would not fit into the memory of a GPU."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Bytes of this process's GPU."""

    policy: LayerPolicy
    """Of all layers; under `auto` the one they begin with."""
    kept_bytes: int
    """What one layer keeps for backward under it."""
    loss_bytes: int
    """Expected of a step, until its loss is there."""
    backward_bytes: int
    """Expected of its backward."""
    capacity_bytes: int
    """What this process may allocate."""

    @property
    def expected_bytes(self) -> int:
        return max(self.loss_bytes, self.backward_bytes)

    @property
    def fits(self) -> bool:
        return self.expected_bytes <= self.capacity_bytes

    def __str__(self) -> str:
        return (
            f"a step is expected to take {self.expected_bytes / GIB:.1f} GiB of the "
            f"{self.capacity_bytes / GIB:.1f} that this process may have on its GPU (until the "
            f"loss {self.loss_bytes / GIB:.1f}, in backward {self.backward_bytes / GIB:.1f}; each "
            f"layer keeps {self.kept_bytes / GIB:.2f} under checkpoint={self.policy!r})"
        )


class Rehearsal:
    """Runs the last layers under policies of their own, and hidden states past the others."""

    def __init__(
        self,
        policies: tuple[LayerPolicy, ...],
        num_layers: int,
        allocated: Callable[[], int],
        host: HostCopies,
        share: float,
    ) -> None:
        self._policies, self._allocated, self._host, self._share = policies, allocated, host, share
        self._first = num_layers - NUM_LAYERS
        self._before: list[int] = []
        self._after = 0

    def run(self, layer: int, forward: Callable[..., Tensor], *args: Tensor) -> Tensor:
        if layer < self._first:
            return args[0]
        self._before.append(self._allocated())
        policy = self._policies[layer - self._first]
        out = run_layer(policy, forward, *args, host=self._host, share=self._share)
        self._after = self._allocated()
        return out

    @property
    def kept_bytes(self) -> int:
        """From the second of them beginning to the last: its own, and what it gave on. As the first
        begins, FSDP still has a buffer of the embeddings."""
        if len(self._before) != NUM_LAYERS:
            raise ValueError(
                f"preflight(): loss_of ran {len(self._before)} of the last {NUM_LAYERS} layers: "
                "give one forward pass in training."
            )
        _, second, last = self._before
        return max(0, last - second)

    @property
    def last_kept_bytes(self) -> int:
        """By the last layer."""
        return max(0, self._after - self._before[-1])


def preflight(
    handle: PatchHandle,
    loss_of: Callable[[], Tensor],
    backward: Callable[[Tensor], object] = torch.Tensor.backward,
    *,
    has_optimizer_states: bool = False,
) -> Preflight | None:
    """Rehearse a training step of a patched model in training mode. Collective.

    Call it before the first step, with the model as it is trained: wrapped by FSDP2, or by DDP
    within its `no_sync()`, since layers that are left out have no gradients to wait for.

    Args:
        loss_of: the forward pass of a batch of the greatest length, as training makes it.
        backward: `accelerator.backward`, say.
        has_optimizer_states: they are there already, of a run that goes on. Else AdamW's two of
            each weight that is trained are added.

    Returns:
        What was found on this rank. None where it can't be told: where torch counts no memory,
        as on CPU, for layers that are not alike, and for no more layers than are rehearsed.

    Raises:
        WillNotFit: on every rank of the sequence group, if a step does not fit on one of them; or
            on a rank where the rehearsal itself is out of memory.
        ValueError: this is no moment for it.
    """
    checkpoints, model = handle._checkpoints, handle.model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _check_moment(handle, trained)
    device = _device_of(trained[0])
    meter = checkpoints.find_meter(device)
    num_layers = len(checkpoints.policies)
    if meter is None or num_layers <= NUM_LAYERS or len(set(checkpoints.kinds())) > 1:
        return None
    policies = checkpoints.to_rehearse(NUM_LAYERS, device)
    host, share = checkpoints.new_host(device), handle.config.attention_kept
    rehearsal = Rehearsal(policies, num_layers, meter.allocated, host, share)
    try:
        with RandomState.now(device).replayed(), checkpoints.rehearsed(rehearsal):
            seen = _seen_in_a_step(meter, loss_of, backward, trained, device)
    except torch.OutOfMemoryError as error:
        raise WillNotFit(f"{NUM_LAYERS} of {num_layers} layers do not fit: {error}") from error
    finally:
        for parameter in trained:
            parameter.grad = None
    all_bytes = sum(_num_bytes(parameter, device) for parameter in trained)
    states = 0 if has_optimizer_states else ADAMW_STATES * all_bytes
    extra, host_layers = _of_auto(policies, rehearsal, host, num_layers)
    others = (num_layers - NUM_LAYERS) * rehearsal.kept_bytes
    # What has no room on the host stays on the device.
    others += max(0, num_layers - 1 - host_layers) * extra.attention
    ending = seen.backward_peak + max(0, all_bytes - seen.gradient_bytes)
    found = Preflight(
        policy=policies[0],
        kept_bytes=rehearsal.kept_bytes,
        loss_bytes=seen.forward_peak + others + states,
        backward_bytes=max(seen.backward_peak + others, ending) + states,
        capacity_bytes=meter.capacity(),
    )
    if policies[0] != policies[-1] and not host.is_full:
        known = Rehearsed(
            extra_bytes=extra,
            host_layers=host_layers,
            peak_bytes=found.expected_bytes,
            rest_bytes=meter.allocated() + states,
        )
        checkpoints.know(device, known)
    everyone = [fits for (fits,) in meet(handle.group, Meeting.PREFLIGHT, (int(found.fits),))]
    if not all(everyone):
        where = f"rank(s) {[rank for rank, fits in enumerate(everyone) if not fits]} of the group"
        raise WillNotFit(f"{found}, and it does not fit on {where}")
    return found


class _Seen(NamedTuple):
    """Bytes, in the step with few layers."""

    forward_peak: int
    backward_peak: int
    gradient_bytes: int


def _seen_in_a_step(
    meter: Meter,
    loss_of: Callable[[], Tensor],
    backward: Callable[[Tensor], object],
    trained: Sequence[nn.Parameter],
    device: torch.device,
) -> _Seen:
    meter.reset_peak()
    loss = loss_of()
    forward_peak = meter.peak()
    meter.reset_peak()
    backward(loss)
    gradients = (parameter.grad for parameter in trained if parameter.grad is not None)
    return _Seen(forward_peak, meter.peak(), sum(_num_bytes(grad, device) for grad in gradients))


def _of_auto(
    policies: tuple[LayerPolicy, ...], rehearsal: Rehearsal, host: HostCopies, num_layers: int
) -> tuple[Extra, int]:
    """(what a layer keeps on each rung beyond the one below, for how many the host has room)."""
    attention, host_layers = 0, num_layers
    if policies[0] == "offload" != policies[-1]:
        attention = host.num_bytes // (NUM_LAYERS - 1)
        host_layers = NUM_LAYERS - 1 + host.times_with_room(attention)
    whole = rehearsal.last_kept_bytes - rehearsal.kept_bytes - attention
    return Extra(attention, max(0, whole)), host_layers


def _check_moment(handle: PatchHandle, trained: list[nn.Parameter]) -> None:
    problem = None
    if not handle._undo:
        problem = "the model is not patched any more: patch it again"
    elif not trained:
        problem = "nothing of the model is trained: set requires_grad, or add an adapter"
    elif not (handle.model.training and torch.is_grad_enabled()):
        problem = "the model is not training: call model.train(), outside of torch.no_grad()"
    elif any(parameter.grad is not None for parameter in trained):
        problem = "there are gradients already: call it before the first step"
    elif any(getattr(p, "_post_accumulate_grad_hooks", None) for p in trained):
        problem = (
            "parameters have hooks that run when their gradients are there, such as an optimizer "
            "in backward, and would train on the rehearsal: add them after it"
        )
    if problem is not None:
        raise ValueError(f"preflight(): {problem}.")


def _device_of(parameter: nn.Parameter) -> torch.device:
    """Where it is computed with; FSDP2 may keep it on the host."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def _num_bytes(tensor: Tensor, device: torch.device) -> int:
    """Of this rank's shard, as far as it is on the device."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.nbytes) if local.device.type == device.type else 0
