"""Will a step fit? Found out with three layers of the true shape, before the first step.

The whole model's forward and backward run on a real batch, but of the decoder's layers the last
three only: hidden states pass by the others. What the step with all layers needs follows from what
this one was seen to need:

    loss      peak until backward comes to the layers   + other layers x what one keeps + optimizer
    backward  peak from there on                        + other layers x what one keeps + optimizer
    its end   the same + gradients of the other layers                                  + optimizer

and the largest must not exceed what this process may allocate. Under `checkpoint="auto"` layers are
offloaded for it, which is the least that it can do, but for the last one, which keeps everything
and is reckoned with as if it did not: so `auto` knows before the first step what each of its
choices takes. It costs three layers of a step; no weight, no gradient and no random number is other
than before. FSDP2 gathers only the layers that run.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from traceback import clear_frames

import torch
from torch import Tensor, nn

from longctx_patch.hf.call.meeting import Meeting, meet
from longctx_patch.hf.layers.rehearsal import NUM_LAYERS, Rehearsal, num_bytes_on
from longctx_patch.hf.patching import PatchHandle
from longctx_patch.memory.auto import Rehearsed
from longctx_patch.memory.ladder import Extra
from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.memory.random_state import RandomState

ADAMW_STATES = 2
GAPS = (
    "segments of torch's allocator are of fixed size, which leaves gaps: it may be out of memory "
    "all the same. Set PYTORCH_ALLOC_CONF=expandable_segments:True before CUDA starts, as "
    "make_accelerator does."
)
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
    """Expected of a step, until backward comes to the layers."""
    backward_bytes: int
    """Expected from there on."""
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
        loss_of: the forward pass of a batch of the greatest length, as training makes it. Where
            training goes forward several times before a backward, leave preflight out.
        backward: `accelerator.backward`, say.
        has_optimizer_states: they are there already, of a run that goes on. Else AdamW's two of
            each weight that is trained are added.

    Warns where a step fits that leaves no room for gaps between tensors, in segments of fixed size.

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
    if meter is None or num_layers <= NUM_LAYERS or not checkpoints.are_alike:
        return None
    policies = checkpoints.to_rehearse(NUM_LAYERS, device)
    host, share = checkpoints.host_to_rehearse(device), handle.config.attention_kept
    rehearsal = Rehearsal(policies, num_layers, meter, host, share)
    try:
        with RandomState.now(device).replayed(), checkpoints.rehearsed(rehearsal):
            seen = rehearsal.step(loss_of, backward, trained)
    except torch.OutOfMemoryError as error:
        clear_frames(error.__traceback__)  # or they hold the step for as long as the error is shown
        raise WillNotFit(f"{NUM_LAYERS} of {num_layers} layers do not fit: {error}") from error
    finally:
        for parameter in trained:
            parameter.grad = None
    extra = rehearsal.extra_bytes
    host_layers = _host_layers(extra, host, handle.checkpointing.host_bytes, num_layers)
    others = _kept_by_others(rehearsal, num_layers, host_layers)
    all_bytes = sum(num_bytes_on(device, parameter) for parameter in trained)
    states = 0 if has_optimizer_states else ADAMW_STATES * all_bytes
    ending = seen.layers_peak + max(0, all_bytes - seen.gradient_bytes)
    # Of the last layer, that `auto` need not keep.
    whole = extra.none + (extra.attention if host_layers >= num_layers else 0)
    found = Preflight(
        policy=policies[0],
        kept_bytes=rehearsal.kept_bytes,
        loss_bytes=seen.loss_peak - whole + others + states,
        backward_bytes=max(seen.layers_peak + others, ending) + states,
        capacity_bytes=meter.capacity(),
    )
    everyone = [fits for (fits,) in meet(handle.group, Meeting.PREFLIGHT, (int(found.fits),))]
    if not all(everyone):
        where = f"rank(s) {[rank for rank, fits in enumerate(everyone) if not fits]} of the group"
        raise WillNotFit(f"{found}, and it does not fit on {where}")
    if found.expected_bytes > meter.fillable(meter.allocated() + states):
        warnings.warn(f"{found}, and {GAPS}", RuntimeWarning, stacklevel=2)
    if policies[0] != policies[-1]:
        known = Rehearsed(
            extra_bytes=extra,
            host_layers=host_layers,
            peak_bytes=max(found.backward_bytes, found.loss_bytes + whole),
            rest_bytes=meter.allocated() + states,
        )
        checkpoints.know(device, known)
    return found


def _host_layers(extra: Extra, host: HostCopies, held_bytes: int, num_layers: int) -> int:
    """For how many the host has room, with what the rehearsal and the run so far hold of it."""
    if not extra.attention:
        return num_layers
    room = host.bytes_with_room + host.num_bytes + held_bytes
    return min(num_layers, room // extra.attention)


def _kept_by_others(rehearsal: Rehearsal, num_layers: int, host_layers: int) -> int:
    """Bytes on the device. What has no room on the host stays there; the last layer is reckoned
    with apart, and what stayed in the rehearsal was seen."""
    staying = max(0, num_layers - 1 - host_layers) * rehearsal.extra_bytes.attention
    stayed = rehearsal.stayed_bytes
    left = (num_layers - NUM_LAYERS) * (rehearsal.kept_bytes - stayed)
    return max(0, left + staying - stayed)


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
