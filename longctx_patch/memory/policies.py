"""What one decoder layer keeps for backward: its checkpoint policy.

| policy | kept per layer | attention in the recompute |
|---|---|---|
| none | all activations | - |
| full | the layer's input | kernel and communication run again |
| attention | the input, attention's out and lse | replayed: neither runs again |
| offload | the same, in pinned host memory | likewise |

Under Ulysses the backward pass of `attention` exchanges q, k, v and out for heads once more, since
the frame keeps this rank's tokens only.

`attention` and `offload` may keep out and lse for a share of the tokens only, those that cost most
to compute again (`longctx_patch.engine.selective`); with a share of 0 they keep the input alone,
which is `full`, or `full` with the inputs on the host.

`attention` costs B * L * H * D numbers of the model's dtype and B * H * L float32 a layer, and
saves a third of attention's forward-and-backward work (DISTFLASHATTN, section 3.3). The policy
`auto` gives each layer one of these (`longctx_patch.memory.auto`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.replay import Getter, as_it_is, checkpoint_contexts

LayerPolicy = Literal["none", "full", "attention", "offload"]


def run_layer(
    policy: LayerPolicy,
    forward: Callable[..., Any],
    *args: Any,
    host: HostCopies | None = None,
    share: float = 1.0,
) -> Any:
    """`forward(*args)` of one layer, hidden states first.

    Its backward follows the policy that its forward ran under. `host` is for `offload`, `share` of
    the tokens have their attention kept by those that keep it.
    """
    if policy == "none":
        return forward(*args)
    if policy == "offload":
        assert host is not None
        kept = host.begin()
        with _inputs_on_host(args[0], kept.keep):
            out = _checkpoint(kept.keep, share, forward, *args)
        kept.leave()
        return out
    return _checkpoint(as_it_is, share if policy == "attention" else 0.0, forward, *args)


def _checkpoint(
    keep: Callable[[Tensor], Getter], share: float, forward: Callable[..., Any], *args: Any
) -> Any:
    if not share:  # torch.compile takes no context of ours
        return checkpoint(forward, *args, use_reentrant=False)
    contexts = partial(checkpoint_contexts, keep, share)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)


def _inputs_on_host(hidden: Tensor, keep: Callable[[Tensor], Getter]) -> saved_tensors_hooks:
    """Hooks for what torch's checkpoint saves of a region's inputs; in the region it has its own.

    Only the hidden states go to the host: all layers share their other inputs.
    """

    place, shape = hidden.data_ptr(), hidden.shape  # the tensor itself would stay as long as pack

    def pack(tensor: Tensor) -> Tensor | Getter:
        is_hidden = tensor.data_ptr() == place and tensor.shape == shape
        return keep(tensor) if is_hidden else tensor

    def unpack(packed: Tensor | Getter) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    return saved_tensors_hooks(pack, unpack)
