"""What one rank sends for one attention call, from the plans alone."""

from typing import NamedTuple

from longctx_patch.engine.call import AttentionCall, HeadWave
from longctx_patch.plans import AttentionShape, Direction, plan_traffic
from longctx_patch.plans.head_split import QKV, Heads
from longctx_patch.plans.head_traffic import to_heads_traffic, to_tokens_traffic
from longctx_patch.plans.traffic import Traffic


class CallTraffic(NamedTuple):
    """Messages and bytes that one rank sends for one attention call."""

    forward: Traffic
    backward: Traffic
    backward_after_replay: Traffic
    """Backward after a recompute replayed (out, lse): Ulysses exchanges q, k, v and out again."""


def predicted_traffic(call: AttentionCall) -> CallTraffic:
    """What this rank will send."""
    waves = [_of_wave(wave) for wave in call.waves]
    return CallTraffic(*(sum(part, Traffic()) for part in zip(*waves, strict=True)))


def _of_wave(wave: HeadWave) -> CallTraffic:
    """What this rank will send for the heads of one wave."""
    shape = wave.call.shape
    lse_bytes = shape.batch * max(4, shape.dtype.itemsize)
    returns = _to_tokens(wave, (Heads.QUERY,))
    if wave.call.returns_lse:
        returns += _to_tokens(wave, (Heads.QUERY,), lse_bytes)
    inputs, query = _to_heads(wave, QKV), _to_heads(wave, (Heads.QUERY,))
    gradients = _of_ring(wave, Direction.BACKWARD) + _to_tokens(wave, QKV)
    return CallTraffic(
        forward=inputs + _of_ring(wave, Direction.FORWARD) + returns,
        backward=query + gradients,
        backward_after_replay=inputs + query + query + gradients,  # out and dout
    )


def _of_ring(wave: HeadWave, direction: Direction) -> Traffic:
    call, split = wave.call, wave.split
    shape = AttentionShape(
        batch=call.shape.batch,
        num_heads=split.query[wave.rank].size,
        num_kv_heads=split.num_kv_computed(wave.rank),
        head_dim=call.shape.head_dim,
        itemsize_bytes=call.shape.dtype.itemsize,
        latent_dim=call.shape.latent_dim,
    )
    return plan_traffic(wave.plan(direction), shape)[call.group.ring.group_rank]


def _to_heads(wave: HeadWave, heads: tuple[Heads, ...]) -> Traffic:
    return to_heads_traffic(
        wave.split,
        heads,
        wave.rank,
        tokens=wave.call.group_sizes[wave.rank],
        bytes_per_head=wave.call.shape.head_bytes,
    )


def _to_tokens(
    wave: HeadWave, heads: tuple[Heads, ...], bytes_per_head: int | None = None
) -> Traffic:
    return to_tokens_traffic(
        wave.split,
        heads,
        wave.rank,
        sizes=wave.call.group_sizes,
        bytes_per_head=bytes_per_head or wave.call.shape.head_bytes,
    )
