"""Walk one rank through a verified plan.

Shapes: B batch, L this rank's query tokens, M key tokens of a block, H query heads, G key-value
heads, D head dim. Every rank of the group calls the same function with its own shard.
"""

from dataclasses import dataclass

from torch import Tensor

from longctx_patch.accumulate import sum_dtype
from longctx_patch.kernels import Kernel
from longctx_patch.masks import Piece
from longctx_patch.operands import Inputs
from longctx_patch.partials import GradientPartial, Partials
from longctx_patch.plans import Operand, Plan, RankStep, Transfer, Work
from longctx_patch.transport import Message, Pending, Transport


@dataclass(frozen=True)
class Executor:
    """What stays the same over the steps of forward and backward."""

    transport: Transport
    kernel: Kernel
    scale: float

    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out_BLHD in q's dtype, lse_BHL) of q_BLHD over the keys of all ranks."""
        rank = self.transport.group_rank
        inputs = Inputs(rank, {Operand.KV: (k, v), Operand.Q: (q,)})
        partials = Partials(rank, {Operand.OUT: (q,)})
        for step in plan.rank_steps[rank]:
            pending = self._post(inputs, partials, step)
            for work in step.works:
                for piece in work.pieces:
                    self._forward_piece(work, piece, inputs, partials)
            pending.wait()
            inputs.land()
            partials.land()
        lse_BLH, out = partials.own(Operand.OUT).parts()
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
        if plan.moves(Operand.Q_BACKWARD):
            own[Operand.Q_BACKWARD] = (lse_BLH, row_dots(dout, out), q, dout)
        inputs = Inputs(rank, own)
        partials = Partials(rank, {Operand.DQ: (q,), Operand.DKV: (k, v)})
        for step in plan.rank_steps[rank]:
            pending = self._post(inputs, partials, step)
            for work in step.works:
                for piece in work.pieces:
                    mine = (lse_BLH, out, q, dout) if work.q_owner == rank else None
                    self._backward_piece(work, piece, mine, inputs, partials)
            pending.wait()
            inputs.land()
            partials.land()
        dq, dkv = partials.own(Operand.DQ), partials.own(Operand.DKV)
        assert isinstance(dq, GradientPartial)
        assert isinstance(dkv, GradientPartial)
        (dq_BLHD,), (dk_BLGD, dv_BLGD) = dq.results(), dkv.parts()
        return dq_BLHD, dk_BLGD, dv_BLGD

    def _forward_piece(self, work: Work, piece: Piece, inputs: Inputs, partials: Partials) -> None:
        (q,) = inputs.find(Operand.Q, work.q_owner, piece.q).rows(piece.q)
        k, v = inputs.find(Operand.KV, work.kv_owner, piece.kv).rows(piece.kv)
        out, lse_BHL = self.kernel.forward(q, k, v, causal=piece.causal, scale=self.scale)
        self.transport.counters.kernel_calls += 1
        partials.add(Operand.OUT, work.q_owner, piece.q, (lse_BHL.transpose(1, 2), out))

    def _backward_piece(
        self,
        work: Work,
        piece: Piece,
        mine: tuple[Tensor, ...] | None,
        inputs: Inputs,
        partials: Partials,
    ) -> None:
        k, v = inputs.find(Operand.KV, work.kv_owner, piece.kv).rows(piece.kv)
        if mine is not None:
            lse_BLH, out, q, dout = (tensor[:, slice(*piece.q)] for tensor in mine)
        else:
            held = inputs.find(Operand.Q_BACKWARD, work.q_owner, piece.q)
            lse_BLH, delta_BLH, q, dout = held.rows(piece.q)
            out = out_with_row_dots(dout, delta_BLH)
        dq, dk, dv = self.kernel.backward(
            dout, q, k, v, out, lse_BLH.transpose(1, 2), causal=piece.causal, scale=self.scale
        )
        self.transport.counters.kernel_calls += 1
        partials.add(Operand.DQ, work.q_owner, piece.q, (dq,))
        partials.add(Operand.DKV, work.kv_owner, piece.kv, (dk, dv))

    def _post(self, inputs: Inputs, partials: Partials, step: RankStep) -> Pending:
        """Post the step's messages, in the order of the plan on both sides."""

        def holder(transfer: Transfer) -> Inputs | Partials:
            return inputs if transfer.block.operand.is_input else partials

        sends = [Message(t.destination, holder(t).outgoing(t)) for t in step.sends]
        receives = [Message(t.source, holder(t).incoming(t)) for t in step.receives]
        return self.transport.exchange(sends, receives)


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
    norm_BLH1 = wide.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    direction = wide / norm_BLH1
    return (direction * (delta_BLH[..., None] / norm_BLH1)).to(dout_BLHD.dtype)
