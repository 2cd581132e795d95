"""Everything about one attention call but its tensors: who computes what, as it was decided."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx_patch.engine.executor import Executor, kernel_calls
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.ulysses import Resharder
from longctx_patch.kernels import Kernel, KernelRequest, Score
from longctx_patch.plans import Direction, Plan, verify_plan
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.head_split import HeadSplit
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.masks import Mask


@lru_cache(maxsize=32)
def make_plan(
    setting: Setting, direction: Direction, documents: Documents, mask: Mask, num_kv_heads: int
) -> Plan:
    """The verified plan of the ring part, over `ring_degree` ranks and all tokens.

    Verification takes milliseconds (0.4 s for 64 ranks), once for each new list of documents.
    """
    plan = setting.schedule(direction, documents, mask, num_kv_heads).plan()
    verify_plan(plan)
    return plan


class CallShape(NamedTuple):
    """Holds what q, k and v have in common on all ranks."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Numbers of a head. Where keys and values differ, the larger; the others are padded to it."""
    dtype: torch.dtype
    device_type: str
    latent_dim: int = 0
    """Numbers of a token's latent and its rotary part, which travel in place of keys and values of
    all heads, as one key-value head (`engine.key_form`); 0: heads travel."""
    expansion: int = 0
    """Weights that expand a latent, where latents travel."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "CallShape":
        """The shape of queries `[B, L, H, D]`, keys `[B, L, G, D]` and values `[B, L, G, V]`."""
        width = max(q.shape[3], v.shape[3])
        return cls(q.shape[0], q.shape[2], k.shape[2], width, q.dtype, q.device.type)

    def with_latents(self, latent: Tensor, rotary: Tensor, value_dim: int) -> "CallShape":
        """The shape where latents `[B, L, 1, R]` and their rotary parts travel."""
        expanded = self.head_dim - rotary.shape[3] + value_dim
        return self._replace(
            head_dim=max(self.head_dim, value_dim),
            latent_dim=latent.shape[3] + rotary.shape[3],
            expansion=latent.shape[3] * self.num_heads * expanded,
        )

    @property
    def num_kernel_kv_heads(self) -> int:
        """Key-value heads of a kernel's call: latents are expanded to as many as queries have."""
        return self.num_heads if self.latent_dim else self.num_kv_heads

    @property
    def reuse(self) -> float:
        """Query heads that are computed with each key-value head that is sent."""
        if self.latent_dim:
            return 2 * self.head_dim * self.num_heads / self.latent_dim
        return self.num_heads / self.num_kv_heads

    @property
    def head_bytes(self) -> int:
        """Bytes of one token's head, over the batch."""
        return self.batch * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class AttentionCall:
    """Everything about one call but the tensors; nothing is left to be chosen."""

    group: SequenceGroup
    documents: Documents
    """The row's documents, which decide the placement of tokens."""
    mask: Mask
    score: Score
    shape: CallShape
    setting: Setting
    """The plans; degrees and placement are those of the group."""
    returns_lse: bool = False
    """Whether lse is wanted for this rank's tokens; under Ulysses it then travels with out."""

    # What is made once per call is cached and not a field, so that `replace` starts without it.

    @cached_property
    def _plans(self) -> dict[Direction, Plan]:
        return {}

    @cached_property
    def selections(self) -> dict[float, Any]:
        """The selections of `longctx_patch.engine.selective`, by share of the tokens kept."""
        return {}

    @cached_property
    def split(self) -> HeadSplit:
        """Returns which heads each rank of the Ulysses group computes."""
        shape = self.shape
        return HeadSplit(shape.num_heads, shape.num_kv_heads, self.group.ulysses.num_ranks)

    @cached_property
    def heads(self) -> slice:
        """The query heads that this rank computes."""
        mine = self.split.query[self.group.ulysses.group_rank]
        return slice(mine.start, mine.stop)

    @cached_property
    def kv_runs(self) -> tuple[Interval, ...] | None:
        """Query heads of each of this rank's key-value heads; None where they group evenly."""
        return self.split.kv_runs(self.group.ulysses.group_rank)

    @cached_property
    def resharder(self) -> Resharder:
        """Exchanges heads for tokens, and results back."""
        return Resharder(self.group.ulysses, self.split, self.group_sizes)

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

    def plan(self, direction: Direction) -> Plan:
        """The plan that the ring part runs for this rank's heads."""
        if direction not in self._plans:
            computed = self.split.num_kv_computed(self.group.ulysses.group_rank)
            self._plans[direction] = make_plan(
                self.setting, direction, self.documents, self.mask, computed
            )
        return self._plans[direction]

    def prepare(self, directions: Iterable[Direction] = tuple(Direction)) -> None:
        """Make plans and kernel calls of these directions before they are needed.

        Nothing is communicated, so calls are left out if the ranks haven't agreed on a kernel yet.
        """
        kernel = self.group.kernels.known(self.group.config.kernel, self._request)
        for plan in map(self.plan, directions):
            if kernel is not None:
                kernel_calls(plan, self.group.ring.group_rank, kernel.traits)

    @cached_property
    def executor(self) -> Executor:
        """Runs the plans; collective where the ranks haven't agreed on a kernel yet."""
        return Executor(self.group.ring, self.group.ring_results, self.kernel(), self.score)

    def kernel(self) -> Kernel:
        """The kernel of all ranks of the group. On GPUs the first call of a kind is collective.

        Raises ValueError where no kernel can do what the mask and the score ask for.
        """
        return self.group.kernels.agree(
            self.group.config.kernel, self._request, self.group.everyone
        )

    @property
    def _request(self) -> KernelRequest:
        """The request to a kernel: the same on all ranks, however heads and tokens divide."""
        shape = self.shape
        kv_heads = -(-shape.num_kernel_kv_heads // self.group.ulysses.num_ranks)
        return KernelRequest(
            shape.device_type,
            shape.dtype,
            shape.head_dim,
            softcap=self.score.softcap is not None,
            tiles=self.mask.has_tiles,
            pieces=not self.mask.is_causal,
            deterministic=self.group.config.deterministic,
            num_heads=kv_heads * (shape.num_heads // shape.num_kernel_kv_heads),
            num_kv_heads=kv_heads,
            num_rows=self.documents.num_tokens // self.group.ring.num_ranks,
        )
