"""Everything about one attention call but its tensors: who computes what, and what will be sent."""

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from longctx_patch.choice import choose
from longctx_patch.config import LongContextConfig, PlanName
from longctx_patch.costs import Setting, Workload, schedule_of
from longctx_patch.documents import Documents
from longctx_patch.executor import Executor, kernel_calls
from longctx_patch.groups import SequenceGroup
from longctx_patch.kernels import Kernel, KernelRequest, Score, choose_kernel
from longctx_patch.layout import Interval
from longctx_patch.masks import Mask, causal
from longctx_patch.placement import placement_of
from longctx_patch.plans import AttentionShape, Direction, Plan, plan_traffic, verify_plan
from longctx_patch.plans.traffic import Traffic
from longctx_patch.ulysses import (
    QKV,
    Heads,
    HeadSplit,
    Resharder,
    to_heads_traffic,
    to_tokens_traffic,
)


@lru_cache(maxsize=32)
def make_plan(
    setting: Setting, direction: Direction, documents: Documents, mask: Mask, num_kv_heads: int
) -> Plan:
    """The plan of the ring part, over `ring_degree` ranks and all tokens, proved right.

    The proof takes milliseconds (0.4 s for 64 ranks), once for each row of other documents.
    """
    plan = schedule_of(setting, direction, documents, mask, num_kv_heads).plan()
    verify_plan(plan)
    return plan


@dataclass(frozen=True)
class AttentionCall:
    """Everything about one call but the tensors."""

    group: SequenceGroup
    documents: Documents
    """Decide the placement of tokens."""
    mask: Mask
    score: Score
    num_heads: int
    num_kv_heads: int
    returns_lse: bool = False
    """Whether lse is wanted for this rank's tokens; under Ulysses it travels with out then."""
    plan_name: PlanName | None = None
    """Another plan than the config's, e.g. for layers with a window."""
    _plans: dict[tuple[Direction, int, int, int], Plan] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def causal(
        cls,
        group: SequenceGroup,
        num_tokens: int,
        scale: float,
        num_heads: int,
        num_kv_heads: int,
        *,
        returns_lse: bool = False,
    ) -> "AttentionCall":
        """Plain causal attention over one document."""
        row, mask, score = Documents.one(num_tokens), causal(num_tokens), Score(scale)
        return cls(group, row, mask, score, num_heads, num_kv_heads, returns_lse)

    @cached_property
    def split(self) -> HeadSplit:
        return HeadSplit(self.num_heads, self.num_kv_heads, self.group.ulysses.num_ranks)

    @cached_property
    def kv_runs(self) -> tuple[Interval, ...] | None:
        """Query heads of each of this rank's key-value heads; None where they group evenly."""
        return self.split.kv_runs(self.group.ulysses.group_rank)

    @cached_property
    def heads(self) -> slice:
        """The query heads that this rank computes."""
        mine = self.split.query[self.group.ulysses.group_rank]
        return slice(mine.start, mine.stop)

    @cached_property
    def resharder(self) -> Resharder | None:
        """None where there is no Ulysses part."""
        if self.group.ulysses.num_ranks == 1:
            return None
        return Resharder(self.group.ulysses, self.split, self._group_sizes)

    @cached_property
    def _group_sizes(self) -> tuple[int, ...]:
        """Tokens of each rank of this Ulysses group."""
        degree = self.group.ulysses.num_ranks
        first = self.group.ring.group_rank * degree
        return self.group.layout(self.documents).sizes[first : first + degree]

    def plan(self, direction: Direction, *, batch: int, head_dim: int, itemsize_bytes: int) -> Plan:
        """What the ring part runs. Sizes matter to the choice that `plan="auto"` makes."""
        key = (direction, batch, head_dim, itemsize_bytes)
        if key not in self._plans:
            self._plans[key] = self._make_plan(*key)
        return self._plans[key]

    def _make_plan(
        self, direction: Direction, batch: int, head_dim: int, itemsize_bytes: int
    ) -> Plan:
        workload = Workload(
            num_tokens=self.documents.num_tokens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            batch=batch,
            itemsize_bytes=itemsize_bytes,
        )
        setting = choose(
            self._config,
            direction,
            workload,
            placement=placement_of(self.group.config, self.documents),
            is_causal=self.mask.is_causal,
        )
        num_kv_heads = self.split.num_kv_computed(self.group.ulysses.group_rank)
        return make_plan(setting, direction, self.documents, self.mask, num_kv_heads)

    @cached_property
    def _config(self) -> LongContextConfig:
        config = self.group.config
        if self.plan_name is None:
            return config
        return replace(config, plan=self.plan_name, backward_plan="auto", ranks_per_node=None)

    def plan_for(self, direction: Direction, q: Tensor) -> Plan:
        """The plan for queries `[B, L, H, D]`."""
        batch, _, _, head_dim = q.shape
        return self.plan(direction, batch=batch, head_dim=head_dim, itemsize_bytes=q.dtype.itemsize)

    def prepare(self, device_type: str, dtype: torch.dtype, head_dim: int, *, batch: int) -> None:
        """Make plans and kernel calls of both directions before they are needed."""
        traits = self.kernel(device_type, dtype, head_dim).traits
        for direction in Direction:
            plan = self.plan(
                direction, batch=batch, head_dim=head_dim, itemsize_bytes=dtype.itemsize
            )
            kernel_calls(plan, self.group.ring.group_rank, traits)

    def executor(self, q: Tensor) -> Executor:
        kernel = self.kernel(q.device.type, q.dtype, q.shape[-1])
        return Executor(self.group.ring, self.group.ring_results, kernel, self.score)

    def kernel(self, device_type: str, dtype: torch.dtype, head_dim: int) -> Kernel:
        """Raises ValueError where no kernel can do what the mask and the score ask for."""
        request = KernelRequest(
            device_type,
            dtype,
            head_dim,
            softcap=self.score.softcap is not None,
            tiles=self.mask.has_tiles,
            pieces=not self.mask.is_causal,
        )
        return choose_kernel(self.group.config.kernel, request)

    def predicted_traffic(self, batch: int, head_dim: int, itemsize_bytes: int) -> "CallTraffic":
        """What this rank will send, from the plans alone."""
        rank, ring_rank = self.group.ulysses.group_rank, self.group.ring.group_rank
        split, sizes = self.split, self._group_sizes
        shape = AttentionShape(
            batch=batch,
            num_heads=split.query[rank].size,
            num_kv_heads=split.num_kv_computed(rank),
            head_dim=head_dim,
            itemsize_bytes=itemsize_bytes,
        )
        ring = {
            direction: plan_traffic(
                self.plan(direction, batch=batch, head_dim=head_dim, itemsize_bytes=itemsize_bytes),
                shape,
            )[ring_rank]
            for direction in Direction
        }
        per_head = batch * head_dim * itemsize_bytes

        def to_heads(*heads: Heads) -> Traffic:
            return to_heads_traffic(split, heads, rank, tokens=sizes[rank], bytes_per_head=per_head)

        def to_tokens(*heads: Heads) -> Traffic:
            return to_tokens_traffic(split, heads, rank, sizes=sizes, bytes_per_head=per_head)

        returns = to_tokens(Heads.QUERY)
        if self.returns_lse:
            wide = batch * max(4, itemsize_bytes)
            lse = to_tokens_traffic(split, [Heads.QUERY], rank, sizes=sizes, bytes_per_head=wide)
            returns = Traffic(returns.messages, returns.bytes + lse.bytes)
        gradients = ring[Direction.BACKWARD] + to_tokens(*QKV)
        return CallTraffic(
            forward=to_heads(*QKV) + ring[Direction.FORWARD] + returns,
            backward=to_heads(Heads.QUERY) + gradients,
            backward_after_replay=to_heads(*QKV, Heads.QUERY, Heads.QUERY) + gradients,
        )


@dataclass(frozen=True)
class CallTraffic:
    """Messages and bytes that one rank sends for one attention call."""

    forward: Traffic
    backward: Traffic
    backward_after_replay: Traffic
    """Where the recompute replayed (out, lse): under Ulysses, backward exchanges q, k, v again."""
