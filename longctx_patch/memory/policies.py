"""What one decoder layer keeps for backward: its checkpoint policy.

| policy | kept per layer | attention in the recompute |
|---|---|---|
| none | all activations | - |
| full | the layer's input | kernel and communication run again |
| attention | the input, attention's out and lse | replayed: neither runs again |

Under Ulysses the backward pass of `attention` exchanges q, k, v and out for heads once more, since
the frame keeps this rank's tokens only.

`attention` costs B * L * H * D numbers of the model's dtype and B * H * L float32 a layer, and
saves a third of attention's forward-and-backward work (DISTFLASHATTN, section 3.3). The policy
`auto` gives each layer one of these (`longctx_patch.memory.auto`).
"""

from collections.abc import Callable
from typing import Any, Literal

from torch.utils.checkpoint import checkpoint, noop_context_fn

from longctx_patch.replay import checkpoint_contexts

LayerPolicy = Literal["none", "full", "attention"]


def run_layer(policy: LayerPolicy, forward: Callable[..., Any], *args: Any) -> Any:
    """`forward(*args)` of one layer. Its backward follows the policy that its forward ran under."""
    if policy == "none":
        return forward(*args)
    contexts = checkpoint_contexts if policy == "attention" else noop_context_fn
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)
