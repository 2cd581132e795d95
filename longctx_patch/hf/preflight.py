"""Will a step fit? Found out with three layers of the true shape, before the first step.

The whole model's forward and backward run on a real batch, but of the decoder's layers the last
three only: hidden states pass by the others. What the step with all layers needs follows from what
this one was seen to need:

    loss      peak of forward                    + other layers x what one keeps + optimizer
    backward  peak of backward                   + other layers x what one keeps + optimizer
    its end   peak of backward + gradients of the other layers                   + optimizer

and the largest must not exceed what this process may allocate. Under `checkpoint="auto"` layers are
offloaded for it, which is the least that it can do. It costs three layers of a step; no weight, no
gradient and no random number is other than before. FSDP2 gathers only the layers that run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longctx_patch.hf.meeting import Meeting, meet
from longctx_patch.hf.patching import PatchHandle
from longctx_patch.memory import HostCopies, LayerPolicy, run_layer
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
    """Of all layers."""
    kept_bytes: int
    """What one layer keeps for backward."""
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
    """Runs the last layers under one policy, and hidden states past the others."""

    def __init__(
        self,
        policy: LayerPolicy,
        num_layers: int,
        allocated: Callable[[], int],
        host: HostCopies,
        share: float,
    ) -> None:
        self._policy, self._allocated, self._host, self._share = policy, allocated, host, share
        self._first = num_layers - NUM_LAYERS
        self._before: list[int] = []

    def run(self, layer: int, forward: Callable[..., Tensor], *args: Tensor) -> Tensor:
        if layer < self._first:
            return args[0]
        self._before.append(self._allocated())
        return run_layer(self._policy, forward, *args, host=self._host, share=self._share)

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


def preflight(
    handle: PatchHandle,
    loss_of: Callable[[], Tensor],
    backward: Callable[[Tensor], object] = torch.Tensor.backward,
) -> Preflight | None:
    """Rehearse a training step of a patched model in training mode. Collective.

    Call it before the first step, with the model as it is trained: wrapped by FSDP2, or by DDP
    within its `no_sync()`, since layers that are left out have no gradients to wait for.

    Args:
        loss_of: the forward pass of a batch of the greatest length, as training makes it.
        backward: `accelerator.backward`, say.

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
    policy = checkpoints.least_memory
    host, share = checkpoints.new_host(device), handle.config.attention_kept
    rehearsal = Rehearsal(policy, num_layers, meter.allocated, host, share)
    try:
        with RandomState.now(device).replayed(), checkpoints.rehearsed(rehearsal):
            meter.reset_peak()
            loss = loss_of()
            forward_peak = meter.peak()
            meter.reset_peak()
            backward(loss)
            backward_peak = meter.peak()
    except torch.OutOfMemoryError as error:
        raise WillNotFit(f"{NUM_LAYERS} of {num_layers} layers do not fit: {error}") from error
    finally:
        grads = [parameter.grad for parameter in trained if parameter.grad is not None]
        has_gradients = sum(_num_bytes(grad, device) for grad in grads)
        del grads
        for parameter in trained:
            parameter.grad = None
    all_bytes = sum(_num_bytes(parameter, device) for parameter in trained)
    others = (num_layers - NUM_LAYERS) * rehearsal.kept_bytes
    states = ADAMW_STATES * all_bytes
    ending = backward_peak + max(0, all_bytes - has_gradients)
    found = Preflight(
        policy=policy,
        kept_bytes=rehearsal.kept_bytes,
        loss_bytes=forward_peak + others + states,
        backward_bytes=max(backward_peak + others, ending) + states,
        capacity_bytes=meter.capacity(),
    )
    everyone = [fits for (fits,) in meet(handle.group, Meeting.PREFLIGHT, (int(found.fits),))]
    if not all(everyone):
        where = f"rank(s) {[rank for rank, fits in enumerate(everyone) if not fits]} of the group"
        raise WillNotFit(f"{found}, and it does not fit on {where}")
    return found


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
