"""Tell before the first step whether it fits into memory, from three layers of the true shape.

The whole model's forward and backward run on a real batch, but only the decoder's last three layers
compute; the others return their input. What this step needed tells what a step with all layers
needs:

    loss      peak until backward comes to the layers   + other layers x what one keeps + optimizer
    backward  peak from there on                        + other layers x what one keeps + optimizer
    its end   the same + gradients of the other layers                                  + optimizer

The largest sum must not exceed what this process may allocate. Under `checkpoint="auto"` all these
layers but the last are offloaded, which takes least memory of what `auto` can choose. The last one
keeps everything, and the difference is subtracted from the sum. So `auto` knows before the first
step what each of its choices takes. A rehearsal costs three layers of a step, and leaves weights,
gradients and random numbers as they were. FSDP2 gathers only the layers that run.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from longctx_patch.hf.handle import PatchHandle
from longctx_patch.hf.layers.rehearsed_step import (
    NUM_LAYERS,
    Rehearsal,
    WholeStep,
    WillNotFit,
    num_bytes_on,
)
from longctx_patch.memory.meter import Meter
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.transport.meeting import Meeting, meet

ADAMW_STATES = 2
GAPS = (
    "segments of torch's allocator are of fixed size, which leaves gaps: it may be out of memory "
    "all the same. Set PYTORCH_ALLOC_CONF=expandable_segments:True before CUDA starts, as "
    "make_accelerator does."
)
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Predicts what a step takes, in bytes of this process's GPU."""

    policy: LayerPolicy
    """The policy of all layers; under `auto` the one that layers begin with."""
    is_least: bool
    """Whether `auto` lets layers keep more while memory is left."""
    kept_bytes: int
    """What one layer keeps for backward under the policy."""
    loss_bytes: int
    """Peak until backward reaches the layers."""
    backward_bytes: int
    """Peak once backward has reached the layers."""
    capacity_bytes: int
    """What this process may allocate."""

    @property
    def expected_bytes(self) -> int:
        return max(self.loss_bytes, self.backward_bytes)

    @property
    def fits(self) -> bool:
        return self.expected_bytes <= self.capacity_bytes

    def __str__(self) -> str:
        least = "; this is the least, and 'auto' uses what is left" if self.is_least else ""
        return (
            f"a step is expected to take {'at least ' * self.is_least}"
            f"{self.expected_bytes / GIB:.1f} GiB of the {self.capacity_bytes / GIB:.1f} that this "
            f"process may have on its GPU (until the loss {self.loss_bytes / GIB:.1f}, in backward "
            f"{self.backward_bytes / GIB:.1f}; each layer keeps {self.kept_bytes / GIB:.2f} under "
            f"checkpoint={self.policy!r}{least})"
        )


def preflight(
    handle: PatchHandle,
    loss_of: Callable[[], Tensor],
    backward: Callable[[Tensor], object] = torch.Tensor.backward,
    *,
    has_optimizer_states: bool = False,
    num_forwards: int = 1,
) -> Preflight | None:
    """Rehearse a training step of a patched model in training mode. Collective.

    Call it before the first step, with the model as it is trained: wrapped by FSDP2, or by DDP
    within its `no_sync()`, since layers that are left out have no gradients to wait for.

    Args:
        loss_of: runs the forward pass of a batch of the greatest length, as training does. Leave
            preflight out where training runs several forward passes before one backward.
        backward: what training calls with the loss, such as `accelerator.backward`.
        has_optimizer_states: whether the states are allocated already, as in a run that goes on.
            Otherwise AdamW's two states of each trained weight are added.
        num_forwards: how many forward passes a step has, each with its backward. From the second on
            gradients of all trained weights are held; they are counted as sharded as weights are.

    Warns if a step fits but leaves no room for gaps between tensors, where the allocator's segments
    are of fixed size.

    Returns:
        What was found on this rank. None where nothing can be predicted: on CPU, where torch counts
        no memory; for layers that are not alike; and for models with at most as many layers as are
        rehearsed.

    Raises:
        WillNotFit: on every rank of the sequence group, if a step does not fit on one of them; or
            on a rank where the rehearsal itself is out of memory.
        ValueError: the model is unpatched or not training, nothing of it is trained, or parameters
            have gradients or gradient hooks; or `loss_of` does not run one forward pass.
    """
    checkpoints = handle._checkpoints
    trained = [parameter for parameter in handle.model.parameters() if parameter.requires_grad]
    _check_moment(handle, trained)
    device = _device_of(trained[0])
    meter = checkpoints.find_meter(device)
    if meter is None or len(checkpoints.policies) <= NUM_LAYERS or not checkpoints.are_alike:
        return None
    rehearsal = Rehearsal(checkpoints, device, meter)
    seen = rehearsal.step(loss_of, backward, trained)
    trained_bytes = num_bytes_on(device, trained)
    step = WholeStep(
        rehearsal=rehearsal,
        seen=seen,
        host_layers=rehearsal.layers_with_room(handle.checkpointing.host_bytes),
        trained_bytes=trained_bytes,
        state_bytes=0 if has_optimizer_states else ADAMW_STATES * trained_bytes,
    )
    accumulated = replace(step, has_gradients=num_forwards > 1)
    found = _checked_result(handle, accumulated, meter)
    if rehearsal.chooses_by_layer:
        # `auto` adds what is held between passes itself.
        checkpoints.know(device, step.known(meter.allocated()))
    return found


def _checked_result(handle: PatchHandle, step: WholeStep, meter: Meter) -> Preflight:
    """Returns what was found. Raises WillNotFit on every rank if a step doesn't fit on one."""
    found = Preflight(
        policy=step.rehearsal.policies[0],
        is_least=step.rehearsal.chooses_by_layer,
        kept_bytes=step.rehearsal.kept_bytes,
        loss_bytes=step.loss_bytes,
        backward_bytes=step.backward_bytes,
        capacity_bytes=meter.capacity(),
    )
    everyone = [
        fits for (fits,) in meet(handle.group.everyone, Meeting.PREFLIGHT, (int(found.fits),))
    ]
    if not all(everyone):
        where = f"rank(s) {[rank for rank, fits in enumerate(everyone) if not fits]} of the group"
        raise WillNotFit(f"{found}, and it does not fit on {where}")
    if found.expected_bytes > meter.fillable(meter.allocated() + step.state_bytes):
        warnings.warn(f"{found}, and {GAPS}", RuntimeWarning, stacklevel=3)
    return found


def _check_moment(handle: PatchHandle, trained: list[nn.Parameter]) -> None:
    problem = None
    if not handle._undo:
        problem = "the model is not patched any more: patch it again"
    elif not trained:
        problem = (
            "no parameter of the model requires a gradient: set requires_grad, or add an adapter"
        )
    elif not (handle.model.training and torch.is_grad_enabled()):
        problem = "the model is not training: call model.train(), outside of torch.no_grad()"
    elif any(parameter.grad is not None for parameter in trained):
        problem = "parameters have gradients already: call preflight before the first step"
    elif any(getattr(p, "_post_accumulate_grad_hooks", None) for p in trained):
        problem = (
            "parameters have hooks that run when their gradients are there, such as an optimizer "
            "in backward, and would train on the rehearsal: add them after it"
        )
    if problem is not None:
        raise ValueError(f"preflight(): {problem}.")


def _device_of(parameter: nn.Parameter) -> torch.device:
    """The device that computes with the parameter; FSDP2 may keep it on the host."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device
