"""The load-balancing loss of a mixture of experts, exact over shards.

transformers' `load_balancing_loss_func` multiplies two means over tokens, for each expert: how
often it was chosen, and its probability (Switch Transformer, eq. 4 to 6,
https://huggingface.co/papers/2101.03961). The mean over shards of their products is another number,
so each rank passes it the router logits of all tokens and computes the same loss.

B rows, L tokens of this rank, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.call.gather import all_tokens
from longctx_patch.sequence.layout import Layout


def whole_router_logits(
    router_logits: Sequence[Tensor],
    group: SequenceGroup,
    layout: Layout,
    real_lengths: Sequence[int],
) -> tuple[Tensor, ...]:
    """Router logits of whole sequences, in place of those of this rank's tokens.

    Collective: every rank of the group calls it, with the same number of layers. Forward gathers
    the logits of each layer on every rank; backward sends nothing.

    This rank's own logits get the gradient of `longctx_patch.loss.law.own_part`; those of other
    ranks get none here.

    Args:
        router_logits: `[B * L, E]` for each layer, any float dtype.
        group: the ranks that share the sequences.
        layout: where their tokens are.
        real_lengths: tokens of each row before its padding, the same on every rank.

    Returns:
        `[sum of real_lengths, E]` for each layer: row after row, tokens in global order.
    """
    is_real_BN = torch.arange(layout.num_tokens) < torch.tensor(real_lengths)[:, None]
    real = is_real_BN.flatten().nonzero()[:, 0]
    return tuple(
        all_tokens(logits.unflatten(0, (len(real_lengths), -1)), group, layout).flatten(0, 1)[
            real.to(logits.device)
        ]
        for logits in router_logits
    )
