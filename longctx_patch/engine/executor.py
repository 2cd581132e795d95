"""Execute one rank's steps of a verified plan, a ring's for example: send, compute, wait.

Shapes: B batch, L this rank's query tokens, M key tokens of a block, H query heads, G key-value
heads, D head dim. Every rank of the group calls the same function with its own shard. Keys and
values have another shape where they travel in another form (`KeyForm`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longctx_patch.engine.accumulate import sum_dtype
from longctx_patch.engine.key_form import AS_HEADS, Grads, KeyForm
from longctx_patch.engine.operands import Inputs, adjoined, pick_rows
from longctx_patch.engine.partials import Partials, ResultKey
from longctx_patch.kernels import BackwardInputs, Kernel, Score, Traits
from longctx_patch.kernels.calls import Call, calls_of
from longctx_patch.kernels.run import run_backward, run_forward
from longctx_patch.plans import EVERYONE, Block, Operand, Plan, RankStep, Share, Work
from longctx_patch.sequence.layout import Interval, Rows
from longctx_patch.transport import Message, Pending, Transport


@dataclass(frozen=True)
class Executor:
    """The parts of a call that stay the same over the steps of forward and backward."""

    transport: Transport
    """Carries inputs."""
    results_transport: Transport
    """Carries results, in a group of its own, so that keys don't queue behind gradients."""
    kernel: Kernel
    score: Score

    def forward(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        *,
        form: KeyForm = AS_HEADS,
    ) -> tuple[Tensor, Tensor]:
        """(out_BLHD in q's dtype, lse_BHL) of q_BLHD over the keys of all ranks.

        `sinks`: `[H]`, a logit for each head that joins the softmax of every row, without a value.
        """
        alone = only_call(plan, self.transport.group_rank, self.kernel.traits)
        if alone is not None and sinks is None:
            out, lse = run_forward(self.kernel, alone, q, *form.expanded(k, v), self.score)
            self.transport.counters.kernel_calls += 1
            return out.to(q.dtype), lse
        rank = self.transport.group_rank
        inputs = Inputs(rank, plan.layout, {Operand.KV: (k, v), Operand.Q: (q,)})
        partials = Partials(rank, k.shape[2], {Operand.OUT: (q,)})
        if sinks is not None and q.shape[1]:
            self._begin_with_sinks(plan, q, sinks, k.shape[2], partials)

        def compute(work: Work, call: Call) -> None:
            self._forward_call(work, call, form, inputs, partials)

        self._walk(plan, inputs, partials, compute)
        lse_BLH, out = partials.own(Operand.OUT, plan.num_head_groups)
        return out, lse_BLH.transpose(1, 2)

    def backward(
        self,
        plan: Plan,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        form: KeyForm = AS_HEADS,
        keys_as_summed: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq_BLHD, dk_BLGD, dv_BLGD) of this rank's shard; `out` and `lse` are forward's.

        `keys_as_summed`: keep dk and dv in the dtype of their sums, for a caller that adds more.
        """
        alone = only_call(plan, self.transport.group_rank, self.kernel.traits)
        if alone is not None:
            given = BackwardInputs(dout, q, k, v, out, lse)
            dq, dk, dv = self._kernel_backward(alone, given, form)
            return dq.to(q.dtype), dk, dv
        rank = self.transport.group_rank
        lse_BLH = lse.transpose(1, 2)
        own: dict[Operand, tuple[Tensor, ...]] = {Operand.KV: (k, v)}
        if Operand.Q_BACKWARD in plan.moved:
            own[Operand.Q_BACKWARD] = (lse_BLH, row_dots(dout, out), q, dout)
        inputs = Inputs(rank, plan.layout, own)
        partials = Partials(rank, k.shape[2], {Operand.DQ: (q,), Operand.DKV: (k, v)})

        def compute(work: Work, call: Call) -> None:
            mine = None
            if work.q_owner == rank:
                mine = tuple(work.heads.cut(x, k.shape[2]) for x in (lse_BLH, out, q, dout))
            self._backward_call(plan, work, call, mine, form, inputs, partials)

        self._walk(plan, inputs, partials, compute)
        (dq_BLHD,) = partials.own(Operand.DQ, plan.num_head_groups)
        dk_BLGD, dv_BLGD = partials.own(Operand.DKV, plan.num_head_groups, as_summed=keys_as_summed)
        return dq_BLHD, dk_BLGD, dv_BLGD

    def _walk(
        self,
        plan: Plan,
        inputs: Inputs,
        partials: Partials,
        compute: Callable[[Work, Call], None],
    ) -> None:
        """Each step: post its messages, compute its works, wait for what arrives."""
        rank = self.transport.group_rank
        calls_of_steps = kernel_calls(plan, rank, self.kernel.traits)
        # The number is for the flight record of a run that hangs here.
        for number, (works, (with_inputs, with_results)) in enumerate(  # noqa: B007
            zip(calls_of_steps, plan.rank_messages[rank], strict=True)
        ):
            arriving_inputs = _post(self.transport, inputs, with_inputs)
            arriving_results = _post(self.results_transport, partials, with_results)
            for work, calls in works:
                for call in calls:
                    compute(work, call)
            arriving_inputs.wait()
            arriving_results.wait()
            inputs.land()
            partials.land()

    def _begin_with_sinks(
        self, plan: Plan, q: Tensor, sinks: Tensor, num_kv_heads: int, partials: Partials
    ) -> None:
        """Start the merge from the sinks: a sink is a key with a logit and no value."""
        # lse needs memory of its own, since results are merged into it.
        lse_BLH = sinks.to(sum_dtype(q.dtype)).expand(q.shape[:3])
        lse_BLH = lse_BLH.clone(memory_format=torch.contiguous_format)
        for part in range(plan.num_head_groups):
            heads = Share(part, plan.num_head_groups)
            mine = tuple(heads.cut(x, num_kv_heads) for x in (lse_BLH, torch.zeros_like(q)))
            key = ResultKey(Operand.OUT, self.transport.group_rank, heads)
            partials.add(key, [Interval(0, q.shape[1])], mine)

    def _forward_call(
        self, work: Work, call: Call, form: KeyForm, inputs: Inputs, partials: Partials
    ) -> None:
        (q,) = _find(inputs, Operand.Q, work.q_owner, work.heads, call.q)
        k, v = _find(inputs, Operand.KV, work.kv_owner, work.heads, call.kv)
        out, lse_BHL = run_forward(self.kernel, call, q, *form.expanded(k, v), self.score)
        self.transport.counters.kernel_calls += 1
        key = ResultKey(Operand.OUT, work.q_owner, work.heads)
        partials.add(key, adjoined(call.q), (lse_BHL.transpose(1, 2), out))

    def _backward_call(
        self,
        plan: Plan,
        work: Work,
        call: Call,
        mine: tuple[Tensor, ...] | None,
        form: KeyForm,
        inputs: Inputs,
        partials: Partials,
    ) -> None:
        k, v = _find(inputs, Operand.KV, work.kv_owner, work.heads, call.kv)
        if mine is not None:
            lse_BLH, out, q, dout = pick_rows(mine, Rows.first(mine[0].shape[1]), call.q)
        else:
            lse_BLH, delta_BLH, q, dout = _find(
                inputs, Operand.Q_BACKWARD, work.q_owner, work.heads, call.q
            )
            out = out_with_row_dots(dout, delta_BLH)
        lse_BHL = lse_BLH.transpose(1, 2)
        dq, dk, dv = self._kernel_backward(call, BackwardInputs(dout, q, k, v, out, lse_BHL), form)
        partials.add(ResultKey(Operand.DQ, work.q_owner, work.heads), adjoined(call.q), (dq,))
        first = 0
        for run in adjoined(call.kv):
            for owner, slots, columns in _owners(plan, work, run):
                part = slice(first + columns.start, first + columns.stop)
                key = ResultKey(Operand.DKV, owner, work.heads)
                partials.add(key, [slots], (dk[:, part], dv[:, part]))
            first += run.size

    def _kernel_backward(self, call: Call, given: BackwardInputs, form: KeyForm) -> Grads:
        """(dq, dk, dv) of a tile; its keys and values, and their gradients, are in their form."""
        self.transport.counters.kernel_calls += 1
        return form.gradients(
            given.k,
            given.v,
            lambda k, v: run_backward(self.kernel, call, given._replace(k=k, v=v), self.score),
        )


@lru_cache(maxsize=128)
def kernel_calls(
    plan: Plan, rank: int, traits: Traits
) -> tuple[tuple[tuple[Work, tuple[Call, ...]], ...], ...]:
    """A rank's works in each step, with the calls that compute them on a kernel of these traits."""
    return tuple(
        tuple((work, calls_of(work.pieces, traits)) for work in step.works)
        for step in plan.rank_steps[rank]
    )


@lru_cache(maxsize=128)
def only_call(plan: Plan, rank: int, traits: Traits) -> Call | None:
    """The one call that does all of a rank's work, over all its rows; None if there is none.

    Such a call skips the bookkeeping, which takes the host longer than a small block takes the GPU.
    """
    if any(step.sends or step.receives for step in plan.rank_steps[rank]):
        return None
    found = [
        (work, call)
        for step in kernel_calls(plan, rank, traits)
        for work, calls in step
        for call in calls
    ]
    if len(found) != 1:
        return None
    work, call = found[0]
    all_rows = [Interval(0, plan.layout.sizes[rank])]
    is_own = work.kv_owner == rank or plan.num_ranks == 1
    return call if is_own and adjoined(call.q) == adjoined(call.kv) == all_rows else None


def _find(
    inputs: Inputs, operand: Operand, owner: int, heads: Share, intervals: tuple[Interval, ...]
) -> list[Tensor]:
    return inputs.find(Block(operand, owner, Rows.of(intervals), heads)).pick(intervals)


def _owners(plan: Plan, work: Work, run: Interval) -> list[tuple[int, Interval, Interval]]:
    """(owner, slots, place in the run) of the keys in a run of columns."""
    if work.kv_owner != EVERYONE:
        return [(work.kv_owner, run, Interval(0, run.size))]
    return [
        (owner, slots, tokens.shift(-run.start)) for owner, slots, tokens in plan.layout.places(run)
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

    Backward uses out only in rowsum(dout * out), so delta travels in place of out, with 1 / D of
    the numbers. The shortest such out is delta * dout / |dout|^2; being the shortest, it is rounded
    to the dtype of the model with no larger error than the true one.
    """
    wide = dout_BLHD.to(delta_BLH.dtype)
    # Divided by the largest entry first: the square of a tiny gradient would underflow.
    largest_BLH1 = wide.abs().amax(-1, keepdim=True)
    largest_BLH1.masked_fill_(largest_BLH1 == 0, 1.0)
    unit = wide / largest_BLH1
    square_BLH1 = unit.square().sum(-1, keepdim=True).clamp_min(1.0)
    return (unit * (delta_BLH[..., None] / largest_BLH1 / square_BLH1)).to(dout_BLHD.dtype)
