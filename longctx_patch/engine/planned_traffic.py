"""The messages of one attention call, counted from the plans alone."""

from typing import NamedTuple

from longctx_patch.engine.call import AttentionCall
from longctx_patch.plans import AttentionShape, Direction, plan_traffic
from longctx_patch.plans.head_split import QKV, Heads, to_heads_traffic, to_tokens_traffic
from longctx_patch.plans.traffic import Traffic


class CallTraffic(NamedTuple):
    """Messages and bytes that one rank sends for one attention call."""

    forward: Traffic
    backward: Traffic
    backward_after_replay: Traffic
    """Backward after a recompute replayed (out, lse): Ulysses exchanges q, k, v and out again."""


def predicted_traffic(call: AttentionCall) -> CallTraffic:
    """The traffic that this rank will send."""
    shape = call.shape
    lse_bytes = shape.batch * max(4, shape.dtype.itemsize)
    returns = _to_tokens(call, (Heads.QUERY,))
    if call.returns_lse:
        returns += _to_tokens(call, (Heads.QUERY,), lse_bytes)
    inputs, query = _to_heads(call, QKV), _to_heads(call, (Heads.QUERY,))
    gradients = _of_ring(call, Direction.BACKWARD) + _to_tokens(call, QKV)
    return CallTraffic(
        forward=inputs + _of_ring(call, Direction.FORWARD) + returns,
        backward=query + gradients,
        backward_after_replay=inputs + query + query + gradients,  # out and dout
    )


def _of_ring(call: AttentionCall, direction: Direction) -> Traffic:
    rank = call.group.ulysses.group_rank
    shape = AttentionShape(
        batch=call.shape.batch,
        num_heads=call.split.query[rank].size,
        num_kv_heads=call.split.num_kv_computed(rank),
        head_dim=call.shape.head_dim,
        itemsize_bytes=call.shape.dtype.itemsize,
        latent_dim=call.shape.latent_dim,
    )
    return plan_traffic(call.plan(direction), shape)[call.group.ring.group_rank]


def _to_heads(call: AttentionCall, heads: tuple[Heads, ...]) -> Traffic:
    rank = call.group.ulysses.group_rank
    return to_heads_traffic(
        call.split,
        heads,
        rank,
        tokens=call.group_sizes[rank],
        bytes_per_head=call.shape.head_bytes,
    )


def _to_tokens(
    call: AttentionCall, heads: tuple[Heads, ...], bytes_per_head: int | None = None
) -> Traffic:
    return to_tokens_traffic(
        call.split,
        heads,
        call.group.ulysses.group_rank,
        sizes=call.group_sizes,
        bytes_per_head=bytes_per_head or call.shape.head_bytes,
    )
