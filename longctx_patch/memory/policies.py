"""Checkpoint policies, as what torch's non-reentrant checkpoint takes for them.

| policy | kept per layer | attention in the recompute |
|---|---|---|
| none | all activations | - |
| full | the layer's input | kernel and communication run again |
| attention | the input, attention's out and lse | replayed: neither runs again |

Under Ulysses the backward pass of `attention` exchanges q, k, v and out for heads once more, since
the frame keeps this rank's tokens only.

`attention` costs B * L * H * D numbers of the model's dtype and B * H * L float32 a layer, and
saves a third of attention's forward-and-backward work (DISTFLASHATTN, section 3.3).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from longctx_patch.config import CheckpointPolicy
from longctx_patch.replay import checkpoint_contexts

ContextFn = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


def context_fn_of(policy: CheckpointPolicy) -> ContextFn | None:
    """`context_fn` for `torch.utils.checkpoint.checkpoint`; None where the default does."""
    return checkpoint_contexts if policy == "attention" else None
