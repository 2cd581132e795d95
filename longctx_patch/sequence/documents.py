"""Says where the documents of a packed row begin and end."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import exp
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # plans and predictions need no torch
    from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Documents one after another from token 0; what is left of `num_tokens` is padding.

    Tokens attend within their document only, padding to nothing at all. A document with a parent is
    a branch: it goes on where the parent ends, and its tokens see the parent too, and what that one
    goes on from.
    """

    lengths: tuple[int, ...]
    num_tokens: int
    parents: tuple[int, ...] = ()
    """The earlier document that each one goes on from, -1 for none. Empty: none of them does."""

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.lengths) or sum(self.lengths) > self.num_tokens:
            raise ValueError(
                f"document lengths {_short(self.lengths)} in {self.num_tokens} tokens: each "
                "document has a token or more, and together they fit. Leave empty ones out."
            )
        known = all(-1 <= parent < number for number, parent in enumerate(self.parents))
        if not known or len(self.parents) not in (0, len(self.lengths)):
            raise ValueError(
                f"parents {_short(self.parents)} of {len(self.lengths)} documents: each document "
                "has one, an earlier document or -1. Leave parents out where none is a branch."
            )

    @classmethod
    def one(cls, num_tokens: int) -> "Documents":
        """A row that is not packed."""
        return cls((num_tokens,) if num_tokens else (), num_tokens)

    @classmethod
    def of_row(
        cls, lengths: tuple[int, ...], num_tokens: int, parents: tuple[int, ...] = ()
    ) -> "Documents":
        """The documents of a padded row. A single document includes the padding: causal attention
        never sees padding, and all rows of one length then share a mask."""
        return cls(lengths, num_tokens, parents) if len(lengths) > 1 else cls.one(num_tokens)

    @classmethod
    def group(cls, num_tokens: int, count: int, own: int) -> "Documents":
        """So many rows of `num_tokens` that differ in their last `own` tokens, as one row: the last
        token that they have in common opens each branch."""
        shared = num_tokens - own - 1
        if shared < 1 or count < 2:
            raise ValueError(
                f"{count} branches of {own} tokens of rows of {num_tokens}: two rows or more share "
                "two tokens or more. Use shorter branches, or longer rows."
            )
        lengths = (shared, *[own + 1] * count)
        return cls(lengths, sum(lengths), (-1, *[0] * count))

    @classmethod
    def typical(cls, num_tokens: int, mean: int) -> "Documents":
        """A full row of documents of log-normal lengths, as those of web text and conversations
        roughly are: the quantiles of exp(N(0, 1)), without chance, about `mean` tokens each."""
        count = max(1, round(num_tokens / mean))
        normal = NormalDist()
        weights = [exp(normal.inv_cdf((number + 0.5) / count)) for number in range(count)]
        edges = [round(edge / sum(weights) * num_tokens) for edge in accumulate(weights, initial=0)]
        lengths = (stop - start for start, stop in pairwise(edges))
        return cls.of_row(tuple(length for length in lengths if length), num_tokens)

    def cut(self, chunk: int, first: int | None = None) -> "Documents":
        """Each document in pieces of `chunk` tokens, of which the last may be shorter, and the
        first has `first` where that is given."""
        if type(chunk) is not int or chunk < 1:
            raise ValueError(f"chunk={chunk!r}: a whole number of tokens. Use 1 or more, or None.")
        if self.has_branches:
            raise ValueError(
                f"chunk={chunk} of documents that go on from others: the chunks of a branch would "
                "begin in its parent. Use documents without branches."
            )
        pieces = (
            min(start + chunk, length) - max(start, 0)
            for length in self.lengths
            for start in range(0 if first is None else first - chunk, length, chunk)
        )
        return Documents(tuple(pieces), self.num_tokens)

    @property
    def is_one(self) -> bool:
        """Says whether a single document fills the row."""
        return sum(self.lengths[:1]) == self.num_tokens

    @property
    def has_branches(self) -> bool:
        return any(parent >= 0 for parent in self.parents)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The position of each document's first token: where its parent ends, or 0."""
        found: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            found.append(found[parent] + self.lengths[parent] if parent >= 0 else 0)
        return tuple(found)

    @property
    def longest(self) -> int:
        """Tokens of the longest document, with what it goes on from."""
        return max(map(int.__add__, self.begins, self.lengths), default=0)

    def path(self, document: int) -> list[int]:
        """What tokens of a document see: those that it goes on from, in their order, and itself."""
        found = [document]
        while self.parents and self.parents[found[0]] >= 0:
            found.insert(0, self.parents[found[0]])
        return found

    def written_out(self) -> "Tensor":
        """Places of the tokens of each path, one after another: of rows without branches."""
        import torch

        ends = [number for number in range(len(self.lengths)) if number not in self.parents]
        on_paths = (document for end in ends for document in self.path(end))
        return torch.cat([torch.arange(*self.edges[at : at + 2]) for at in on_paths])

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """The starts of all documents, and the end of the last one."""
        return tuple(accumulate(self.lengths, initial=0))

    def positions(self, tokens: "Tensor") -> "Tensor":
        """Place of each token (int64, any shape) in its document, which counts on from its parent;
        padding counts from its start."""
        import torch

        if len(self.lengths) < 2:
            return tokens
        edges = torch.tensor(self.edges, device=tokens.device)
        document = torch.searchsorted(edges, tokens, right=True) - 1
        places = tokens - edges[document]
        if not self.has_branches:
            return places
        return places + torch.tensor([*self.begins, 0], device=tokens.device)[document]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.lengths, self.num_tokens, self.parents))


def _short(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return f"({shown}{', ...' if len(numbers) > 6 else ''})"
