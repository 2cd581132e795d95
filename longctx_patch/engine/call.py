"""Everything about one attention call but its tensors: who computes what, and what will be sent."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx_patch.choose.chooser import choose, choose_waves
from longctx_patch.config import LongContextConfig, PlanName
from longctx_patch.engine.executor import Executor, kernel_calls
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.ulysses import Resharder, to_heads_traffic, to_tokens_traffic
from longctx_patch.kernels import Kernel, KernelRequest, Score
from longctx_patch.plans import AttentionShape, Direction, Plan, plan_traffic, verify_plan
from longctx_patch.plans.head_split import QKV, Heads, HeadSplit
from longctx_patch.plans.traffic import Traffic
from longctx_patch.predict.attention.costs import Setting, Workload, schedule_of, window_like
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.masks import Mask, causal
from longctx_patch.sequence.placement import placement_of


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

    # What is made once for a call is no field of it, so that `replace` makes it anew.

    @cached_property
    def _plans(self) -> dict[tuple[Direction, int, int, int, int], Plan]:
        return {}

    @cached_property
    def _executors(self) -> dict[tuple[str, torch.dtype, int], Executor]:
        return {}

    @cached_property
    def _waves(self) -> "dict[tuple[int, int, int], tuple[HeadWave, ...]]":
        return {}

    @cached_property
    def selections(self) -> dict[float, Any]:
        """What `longctx_patch.engine.selective` has made of this call, by share of the tokens."""
        return {}

    def waves(self, batch: int, head_dim: int, itemsize_bytes: int) -> "tuple[HeadWave, ...]":
        """The heads, in the parts in which Ulysses exchanges them; one without a Ulysses part."""
        shape = (batch, head_dim, itemsize_bytes)
        if shape not in self._waves:
            split = HeadSplit(self.num_heads, self.num_kv_heads, self.group.ulysses.num_ranks)
            most = choose_waves(self.group.config, self._workload(*shape))
            self._waves[shape] = tuple(HeadWave(self, part) for part in split.in_waves(most))
        return self._waves[shape]

    def waves_for(self, tensor: Tensor) -> "tuple[HeadWave, ...]":
        """Those of tensors `[B, L, heads, D]`."""
        return self.waves(tensor.shape[0], tensor.shape[3], tensor.dtype.itemsize)

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Tokens of each rank of this Ulysses group."""
        sizes = self.group.layout(self.documents).sizes
        return tuple(sizes[rank] for rank in self._ulysses_ranks)

    def group_positions(self) -> Tensor:
        """Global positions of the tokens of this Ulysses group: int64 `[S]`."""
        layout = self.group.layout(self.documents)
        return torch.cat([layout.positions(rank) for rank in self._ulysses_ranks])

    @property
    def _ulysses_ranks(self) -> range:
        degree = self.group.ulysses.num_ranks
        first = self.group.ring.group_rank * degree
        return range(first, first + degree)

    def plan(
        self,
        direction: Direction,
        *,
        batch: int,
        head_dim: int,
        itemsize_bytes: int,
        num_kv_heads: int,
    ) -> Plan:
        """What the ring part runs for `num_kv_heads` key-value heads of its own.

        The other sizes matter to the choice that `plan="auto"` makes.
        """
        key = (direction, batch, head_dim, itemsize_bytes, num_kv_heads)
        if key not in self._plans:
            self._plans[key] = self._make_plan(*key)
        return self._plans[key]

    def _make_plan(
        self,
        direction: Direction,
        batch: int,
        head_dim: int,
        itemsize_bytes: int,
        num_kv_heads: int,
    ) -> Plan:
        setting = choose(
            self._config,
            direction,
            self._workload(batch, head_dim, itemsize_bytes),
            placement=placement_of(self.group.config, self.documents),
            is_causal=self.mask.is_causal,
        )
        return make_plan(setting, direction, self.documents, self.mask, num_kv_heads)

    def _workload(self, batch: int, head_dim: int, itemsize_bytes: int) -> Workload:
        return Workload(
            num_tokens=self.documents.num_tokens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            batch=batch,
            itemsize_bytes=itemsize_bytes,
            window=None if self.mask.is_causal else window_like(self.mask),
        )

    @cached_property
    def _config(self) -> LongContextConfig:
        config = self.group.config
        if self.plan_name is None:
            return config
        return replace(config, plan=self.plan_name, backward_plan="auto", ranks_per_node=None)

    def prepare(
        self,
        device_type: str,
        dtype: torch.dtype,
        head_dim: int,
        *,
        batch: int,
        directions: Iterable[Direction] = tuple(Direction),
    ) -> None:
        """Make plans and kernel calls of these directions before they are needed.

        It asks no other rank, so calls are left out where the ranks haven't agreed on a kernel yet.
        """
        request = self._request(device_type, dtype, head_dim)
        kernel = self.group.kernels.known(self.group.config.kernel, request)
        for wave, direction in product(self.waves(batch, head_dim, dtype.itemsize), directions):
            plan = wave.plan(direction, batch, head_dim, dtype.itemsize)
            if kernel is not None:
                kernel_calls(plan, self.group.ring.group_rank, kernel.traits)

    def executor(self, q: Tensor) -> Executor:
        key = (q.device.type, q.dtype, q.shape[-1])
        if key not in self._executors:
            group = self.group
            kernel = self.kernel(*key)
            self._executors[key] = Executor(group.ring, group.ring_results, kernel, self.score)
        return self._executors[key]

    def kernel(self, device_type: str, dtype: torch.dtype, head_dim: int) -> Kernel:
        """What all ranks of the group compute with: collective on GPUs, for the first such call.

        Raises ValueError where no kernel can do what the mask and the score ask for.
        """
        request = self._request(device_type, dtype, head_dim)
        return self.group.kernels.agree(self.group.config.kernel, request, self.group.everyone)

    def _request(self, device_type: str, dtype: torch.dtype, head_dim: int) -> KernelRequest:
        """The same on every rank of the group, also where heads and tokens don't divide evenly."""
        ulysses = self.group.ulysses.num_ranks
        kv_heads = -(-self.num_kv_heads // ulysses)
        return KernelRequest(
            device_type,
            dtype,
            head_dim,
            softcap=self.score.softcap is not None,
            tiles=self.mask.has_tiles,
            pieces=not self.mask.is_causal,
            deterministic=self.group.config.deterministic,
            num_heads=kv_heads * (self.num_heads // self.num_kv_heads),
            num_kv_heads=kv_heads,
            num_rows=self.documents.num_tokens // self.group.ring.num_ranks,
        )

    def predicted_traffic(self, batch: int, head_dim: int, itemsize_bytes: int) -> "CallTraffic":
        """What this rank will send, from the plans alone."""
        shape = (batch, head_dim, itemsize_bytes)
        waves = [wave.predicted_traffic(*shape) for wave in self.waves(*shape)]
        return CallTraffic(*(sum(part, Traffic()) for part in zip(*waves, strict=True)))


@dataclass(frozen=True)
class HeadWave:
    """Heads that are exchanged and computed together."""

    call: AttentionCall
    split: HeadSplit

    @property
    def _rank(self) -> int:
        return self.call.group.ulysses.group_rank

    @cached_property
    def kv_runs(self) -> tuple[Interval, ...] | None:
        """Query heads of each of this rank's key-value heads; None where they group evenly."""
        return self.split.kv_runs(self._rank)

    @cached_property
    def heads(self) -> slice:
        """The query heads that this rank computes."""
        mine = self.split.query[self._rank]
        return slice(mine.start, mine.stop)

    @cached_property
    def resharder(self) -> Resharder:
        return Resharder(self.call.group.ulysses, self.split, self.call.group_sizes)

    def plan(self, direction: Direction, batch: int, head_dim: int, itemsize_bytes: int) -> Plan:
        return self.call.plan(
            direction,
            batch=batch,
            head_dim=head_dim,
            itemsize_bytes=itemsize_bytes,
            num_kv_heads=self._num_kv_computed,
        )

    @cached_property
    def _num_kv_computed(self) -> int:
        return self.split.num_kv_computed(self._rank)

    def plan_for(self, direction: Direction, q: Tensor) -> Plan:
        """The plan for queries `[B, L, H, D]`."""
        return self.plan(direction, q.shape[0], q.shape[3], q.dtype.itemsize)

    def predicted_traffic(self, batch: int, head_dim: int, itemsize_bytes: int) -> "CallTraffic":
        """What this rank will send for these heads."""
        split, rank, sizes = self.split, self._rank, self.call.group_sizes
        shape = AttentionShape(
            batch=batch,
            num_heads=split.query[rank].size,
            num_kv_heads=split.num_kv_computed(rank),
            head_dim=head_dim,
            itemsize_bytes=itemsize_bytes,
        )
        ring_rank = self.call.group.ring.group_rank
        ring = {
            direction: plan_traffic(self.plan(direction, batch, head_dim, itemsize_bytes), shape)[
                ring_rank
            ]
            for direction in Direction
        }
        per_head = batch * head_dim * itemsize_bytes

        def to_heads(*heads: Heads) -> Traffic:
            return to_heads_traffic(split, heads, rank, tokens=sizes[rank], bytes_per_head=per_head)

        def to_tokens(*heads: Heads, bytes_per_head: int = per_head) -> Traffic:
            return to_tokens_traffic(split, heads, rank, sizes=sizes, bytes_per_head=bytes_per_head)

        returns = to_tokens(Heads.QUERY)
        if self.call.returns_lse:
            returns += to_tokens(Heads.QUERY, bytes_per_head=batch * max(4, itemsize_bytes))
        inputs, query = to_heads(*QKV), to_heads(Heads.QUERY)
        gradients = ring[Direction.BACKWARD] + to_tokens(*QKV)
        return CallTraffic(
            forward=inputs + ring[Direction.FORWARD] + returns,
            backward=query + gradients,
            backward_after_replay=inputs + query + query + gradients,  # out and dout
        )


class CallTraffic(NamedTuple):
    """Messages and bytes that one rank sends for one attention call."""

    forward: Traffic
    backward: Traffic
    backward_after_replay: Traffic
    """Where the recompute replayed (out, lse): Ulysses exchanges q, k, v and out once more."""
