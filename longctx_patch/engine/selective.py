"""Keep attention's results for the tokens that cost most to compute again, and for no others.

Under a causal mask the cost of a token grows with the number of tokens before it, so the last
tokens of each document are kept. If these are a share x of the row, recomputing the others takes
(1 - x)^2 of attention's forward pass and saves 1 - x of its results' memory (sequence-level
selective checkpointing; BurstEngine, Sun et al. 2025). Half the memory is a quarter of the work.

Each rank selects among the rows that it has computed. Under Ulysses these are all tokens of the
group, for some heads, so ranks keep equal amounts wherever tokens are placed. Ring ranks do so only
with a layout that spreads a document's end over all of them, as `striped` does.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.engine.call import AttentionCall
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.table import SPARSE_PLAN
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.masks import Mask, mask_of
from longctx_patch.sequence.regions import FULL, Piece


class KeptRows(NamedTuple):
    """Attention's results for the selected rows, for this rank's heads."""

    out: Tensor
    """`[B, kept, heads, D]`."""
    lse: Tensor
    """`[B, heads, kept]`."""


@dataclass(frozen=True)
class Selection:
    """The rows of one attention call whose results are kept."""

    call: AttentionCall
    cut: int
    """The position in each document from which on tokens are kept."""

    @cached_property
    def early(self) -> AttentionCall:
        """The call for the other rows, which are computed again."""
        mask = self.call.mask & rows_before(self.call.documents, self.cut)
        return replace(self.call, mask=mask, setting=self.call.setting.with_plan(SPARSE_PLAN))

    def prepare(self) -> None:
        """Make kernel and plans of the recompute before backward. Collective where ranks haven't
        agreed on a kernel for such a call yet."""
        self.early.kernel()
        self.early.plan(Direction.FORWARD)

    def kept(self, out: Tensor, lse: Tensor) -> KeptRows:
        """Copies of the selected rows of `[B, S, heads, D]` and `[B, heads, S]`."""
        rows = self._rows_on(out.device)
        return KeptRows(out.index_select(1, rows), lse.index_select(2, rows))

    def complete(self, out: Tensor, lse: Tensor, kept: KeptRows) -> None:
        """Put the selected rows into the results of `early`, in place."""
        rows = self._rows_on(out.device)
        out.index_copy_(1, rows, kept.out)
        lse.index_copy_(2, rows, kept.lse)

    def _rows_on(self, device: torch.device) -> Tensor:
        """`_rows` on a device, copied once, because a copy waits for the device."""
        if device not in self._copies:
            self._copies[device] = self._rows.to(device)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def _rows(self) -> Tensor:
        """Indices (int64) of the selected tokens among those of this rank's Ulysses group."""
        documents, tokens = self.call.documents, self.call.group_positions()
        is_padding = tokens >= documents.edges[-1]
        return ((documents.positions(tokens) >= self.cut) & ~is_padding).nonzero().flatten()


def selection_of(call: AttentionCall, share: float) -> Selection | None:
    """The selection of at most a share of the row's tokens, made once for a call.

    None if that share is all tokens."""
    if share not in call.selections:
        cut = first_kept(call.documents, share)
        call.selections[share] = Selection(call, cut) if cut else None
    found: Selection | None = call.selections[share]
    return found


def first_kept(documents: Documents, share: float) -> int:
    """The first position in documents such that at most a share of all tokens are there or later.

    Example:
        >>> first_kept(Documents((6, 2), 8), 0.25)
        4
    """
    most = share * sum(documents.lengths)

    def is_few_enough(place: int) -> bool:
        sizes = zip(documents.lengths, documents.begins, strict=True)
        return sum(min(n, max(0, begins + n - place)) for n, begins in sizes) <= most

    return bisect_left(range(documents.longest + 1), True, key=is_few_enough)


def rows_before(documents: Documents, place: int) -> Mask:
    """A mask: the first `place` tokens of each document see everything, the others nothing."""
    everything = Interval(0, documents.num_tokens)
    sizes = zip(documents.edges, documents.lengths, documents.begins, strict=False)
    rows = [Interval(at, at + min(n, max(0, place - begins))) for at, n, begins in sizes]
    regions = [Piece(row, everything, FULL) for row in rows if row.size]
    return mask_of(documents.num_tokens, regions, f"first {place} tokens")
