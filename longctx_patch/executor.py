"""Walk one rank through a verified plan.

Shapes: B batch, L this rank's query tokens, M key tokens of a block, H query heads, G key-value
heads, D head dim. Every rank of the group calls the same function with its own shard.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longctx_patch.accumulate import sum_dtype
from longctx_patch.kernels import Kernel
from longctx_patch.layout import Interval
from longctx_patch.masks import Piece
from longctx_patch.operands import Inputs
from longctx_patch.partials import Partials
from longctx_patch.plans import EVERYONE, Block, Operand, Plan, RankStep, Work
from longctx_patch.transport import Message, Pending, Transport


@dataclass(frozen=True)
class Executor:
    """What stays the same over the steps of forward and backward."""

    transport: Transport
    """Carries inputs."""
    results_transport: Transport
    """Carries results: of a group of its own, so that keys don't queue behind gradients."""
    kernel: Kernel
    scale: float

    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out_BLHD in q's dtype, lse_BHL) of q_BLHD over the keys of all ranks."""
        rank = self.transport.group_rank
        inputs = Inputs(rank, plan.layout, {Operand.KV: (k, v), Operand.Q: (q,)})
        partials = Partials(rank, k.shape[2], {Operand.OUT: (q,)})

        def compute(work: Work, piece: Piece) -> None:
            self._forward_piece(work, piece, inputs, partials)

        self._walk(plan, inputs, partials, compute)
        lse_BLH, out = partials.own(Operand.OUT, plan.num_head_groups)
        return out, lse_BLH.transpose(1, 2)

    def backward(
        self, plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq_BLHD, dk_BLGD, dv_BLGD) of this rank's shard; `out` and `lse` are forward's.

        dk and dv come as they were summed, so that a sum over repeated heads can go on from there.
        """
        rank = self.transport.group_rank
        lse_BLH = lse.transpose(1, 2)
        own: dict[Operand, tuple[Tensor, ...]] = {Operand.KV: (k, v)}
        if Operand.Q_BACKWARD in plan.moved:
            own[Operand.Q_BACKWARD] = (lse_BLH, row_dots(dout, out), q, dout)
        inputs = Inputs(rank, plan.layout, own)
        partials = Partials(rank, k.shape[2], {Operand.DQ: (q,), Operand.DKV: (k, v)})

        def compute(work: Work, piece: Piece) -> None:
            mine = None
            if work.q_owner == rank:
                mine = tuple(work.heads.cut(x, k.shape[2]) for x in (lse_BLH, out, q, dout))
            self._backward_piece(plan, work, piece, mine, inputs, partials)

        self._walk(plan, inputs, partials, compute)
        (dq_BLHD,) = partials.own(Operand.DQ, plan.num_head_groups)
        dk_BLGD, dv_BLGD = partials.own(Operand.DKV, plan.num_head_groups)
        return dq_BLHD.to(q.dtype), dk_BLGD, dv_BLGD

    def _walk(
        self,
        plan: Plan,
        inputs: Inputs,
        partials: Partials,
        compute: Callable[[Work, Piece], None],
    ) -> None:
        """Each step: post its messages, compute its works, wait for what arrives."""
        rank = self.transport.group_rank
        for step, (with_inputs, with_results) in zip(
            plan.rank_steps[rank], plan.rank_messages[rank], strict=True
        ):
            arriving_inputs = _post(self.transport, inputs, with_inputs)
            arriving_results = _post(self.results_transport, partials, with_results)
            for work in step.works:
                for piece in work.pieces:
                    compute(work, piece)
            arriving_inputs.wait()
            arriving_results.wait()
            inputs.land()
            partials.land()

    def _forward_piece(self, work: Work, piece: Piece, inputs: Inputs, partials: Partials) -> None:
        q_block = Block(Operand.Q, work.q_owner, piece.q, work.heads)
        (q,) = inputs.find(q_block).rows(piece.q)
        k, v = inputs.find(_keys(work, piece)).rows(piece.kv)
        out, lse_BHL = self.kernel.forward(q, k, v, causal=piece.causal, scale=self.scale)
        self.transport.counters.kernel_calls += 1
        partials.add(q_block._replace(operand=Operand.OUT), (lse_BHL.transpose(1, 2), out))

    def _backward_piece(
        self,
        plan: Plan,
        work: Work,
        piece: Piece,
        mine: tuple[Tensor, ...] | None,
        inputs: Inputs,
        partials: Partials,
    ) -> None:
        k, v = inputs.find(_keys(work, piece)).rows(piece.kv)
        q_block = Block(Operand.Q_BACKWARD, work.q_owner, piece.q, work.heads)
        if mine is not None:
            lse_BLH, out, q, dout = (tensor[:, slice(*piece.q)] for tensor in mine)
        else:
            lse_BLH, delta_BLH, q, dout = inputs.find(q_block).rows(piece.q)
            out = out_with_row_dots(dout, delta_BLH)
        dq, dk, dv = self.kernel.backward(
            dout, q, k, v, out, lse_BLH.transpose(1, 2), causal=piece.causal, scale=self.scale
        )
        self.transport.counters.kernel_calls += 1
        partials.add(q_block._replace(operand=Operand.DQ), (dq,))
        for owner, slots, columns in _owners(plan, work, piece):
            block = Block(Operand.DKV, owner, slots, work.heads)
            partials.add(block, (dk[:, slice(*columns)], dv[:, slice(*columns)]))


def _keys(work: Work, piece: Piece) -> Block:
    return Block(Operand.KV, work.kv_owner, piece.kv, work.heads)


def _owners(plan: Plan, work: Work, piece: Piece) -> list[tuple[int, Interval, Interval]]:
    """(owner, slots, columns of the piece) of the keys that a piece meets."""
    if work.kv_owner != EVERYONE:
        return [(work.kv_owner, piece.kv, Interval(0, piece.kv.size))]
    return [
        (owner, slots, tokens.shift(-piece.kv.start))
        for owner, slots, tokens in plan.layout.places(piece.kv)
    ]


def _post(transport: Transport, held: Inputs | Partials, messages: RankStep) -> Pending:
    """Post messages in the order of the plan, which is the same on both sides."""
    return transport.exchange(
        [Message(t.destination, held.outgoing(t)) for t in messages.sends],
        [Message(t.source, held.incoming(t)) for t in messages.receives],
    )


def row_dots(dout_BLHD: Tensor, out_BLHD: Tensor) -> Tensor:
    """delta_BLH: rowsum(dout * out), float32 or wider (FlashAttention-2, algorithm 2)."""
    wide = sum_dtype(dout_BLHD.dtype)
    return (dout_BLHD.to(wide) * out_BLHD.to(wide)).sum(-1)


def out_with_row_dots(dout_BLHD: Tensor, delta_BLH: Tensor) -> Tensor:
    """An `out` whose row dots with dout are delta, for kernels that take out and not delta.

    Backward uses out in rowsum(dout * out) only, so delta travels in its place, 1 / D of the
    bytes. The shortest such out is delta * dout / |dout|^2; being the shortest, it is rounded to
    the dtype of the model with no larger error than the true one.
    """
    wide = dout_BLHD.to(delta_BLH.dtype)
    # Divided by the largest entry first: the square of a tiny gradient would underflow.
    largest_BLH1 = wide.abs().amax(-1, keepdim=True)
    largest_BLH1.masked_fill_(largest_BLH1 == 0, 1.0)
    unit = wide / largest_BLH1
    square_BLH1 = unit.square().sum(-1, keepdim=True).clamp_min(1.0)
    return (unit * (delta_BLH[..., None] / largest_BLH1 / square_BLH1)).to(dout_BLHD.dtype)
