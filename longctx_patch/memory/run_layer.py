"""Run one decoder layer so that its backward follows a checkpoint policy."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.policies import POLICIES, LayerPolicy
from longctx_patch.memory.replay import Getter, as_it_is, checkpoint_contexts


def run_layer(
    policy: LayerPolicy,
    forward: Callable[..., Any],
    *args: Any,
    host: HostCopies | None = None,
    share: float = 1.0,
) -> Any:
    """Return `forward(*args)` of one layer, whose first argument is its hidden states.

    The layer's backward follows the policy that its forward ran under. `host` is needed by policies
    that keep tensors on the host. `share`, from 0 to 1, is the part of the tokens whose attention
    is kept by policies that keep it.
    """
    record = POLICIES[policy]
    if not record.recomputes_layer:
        return forward(*args)
    share = share if record.replays(share) else 0.0
    if not record.on_host:
        return _checkpoint(as_it_is, share, forward, *args)
    assert host is not None
    kept = host.begin()
    with _inputs_on_host(args[0], kept.keep):
        out = _checkpoint(kept.keep, share, forward, *args)
    kept.leave()
    return out


def _checkpoint(
    keep: Callable[[Tensor], Getter], share: float, forward: Callable[..., Any], *args: Any
) -> Any:
    if not share:  # torch.compile does not accept our contexts
        return checkpoint(forward, *args, use_reentrant=False)
    contexts = partial(checkpoint_contexts, keep, share)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)


def _inputs_on_host(hidden: Tensor, keep: Callable[[Tensor], Getter]) -> saved_tensors_hooks:
    """Hooks for the inputs that torch's checkpoint saves; inside the region it has its own hooks.

    Only the hidden states go to the host, since all layers share their other inputs.
    """

    place, shape = hidden.data_ptr(), hidden.shape  # `pack` must not hold the tensor itself

    def pack(tensor: Tensor) -> Tensor | Getter:
        is_hidden = tensor.data_ptr() == place and tensor.shape == shape
        return keep(tensor) if is_hidden else tensor

    def unpack(packed: Tensor | Getter) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    return saved_tensors_hooks(pack, unpack)
