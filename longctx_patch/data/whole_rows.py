"""Batches of whole rows, as any trainer makes them, read as rows of `SequenceShardCollator`.

Rows are padded on the right or on the left, which `attention_mask` says, or packed with documents,
which `position_ids` that start anew, `cu_seq_lens_q` or `seq_lengths` say. transformers' and TRL's
collators make all of these.
"""

import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from longctx_patch.data.rows import Row
from longctx_patch.data.stock_rows import Lengths, StockModel, check_labels, check_read_alike
from longctx_patch.loss.law import IGNORE_INDEX

WANTED_KEY = "longctx_wanted"
"""Key of a `Wanted`, in a batch of whole rows whose loss is not what is wanted."""

Wanted = Literal["loss", "logits", "log_probs", "top1", "fused", "scores"]
"""What a pass over whole rows returns: `log_probs` of labels by our own head, with top-1 hits or
without (`top1`), the fields of TRL's fused head (`fused`), or those of them that TRL's trainers
read, by our head (`scores`)."""


class ContradictionError(ValueError):
    """Documents are said in two ways, which differ."""


class HeadScores(NamedTuple):
    """Says how our head makes `scores`."""

    by_row: bool = False
    """Whether the gradients of log-probabilities are one number in each row, and may differ from
    row to row."""
    with_mean_logits: bool = False
    """Whether the mean of each token's logits over words is one of them."""


READ = frozenset(
    {
        *("input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", "seq_idx"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }
)
"""Arguments of a forward pass that say what its rows are."""


class WholeRows(NamedTuple):
    """A batch `[B, L]` of whole rows."""

    rows: tuple[Row, ...]
    """Without padding, on the CPU."""
    spans: tuple[tuple[int, int], ...]
    """(first, one past the last) column of each row's tokens: the others are padding."""
    length: int
    """L"""

    @property
    def is_packed(self) -> bool:
        """Says whether a row has several documents, so that all rows are joined into one."""
        return any(len(row.lengths) > 1 for row in self.rows)


class SharedTokens(NamedTuple):
    """Says where the tokens of rows are in the one row that they became, since some begin alike."""

    places: Tensor
    """`[B, L]`: the place of each column's token, -1 on padding."""
    has_label: Tensor
    """`[B, L - 1]`: whether the token after each one has a label in this row."""

    def counted(self, held: Tensor, num_tokens: int) -> Tensor:
        """Returns those of a rank's tokens at `held` that have a label, each once for every row
        that has it, as in the loss of rows apart."""
        local = torch.full((num_tokens,), -1)
        local[held] = torch.arange(len(held))
        mine = local[self.places[:, :-1][self.has_label]]
        return mine[mine >= 0]

    def alike(self, held: Tensor, num_tokens: int, *, by_row: bool) -> tuple[Tensor, list[int]]:
        """Returns those of a rank's tokens at `held` that have a label; and how many of these in
        turn have it in the same rows (`by_row`), or else as often. A row of documents that begin
        alike has it more than once."""
        counts = torch.zeros(num_tokens, len(self.places), dtype=torch.int32)
        row, column = self.has_label.nonzero(as_tuple=True)
        once = torch.ones_like(row, dtype=torch.int32)
        counts.index_put_((self.places[row, column], row), once, accumulate=True)
        labelled = counts[held].any(1).nonzero()[:, 0]
        rows = counts[held[labelled]]
        _, sets, sizes = (rows if by_row else rows.sum(1, keepdim=True)).unique(
            dim=0, return_inverse=True, return_counts=True
        )
        return labelled[sets.argsort(stable=True)], sizes.tolist()

    def checksum(self) -> int:
        """Tells batches apart that become the same row."""
        return zlib.crc32(
            self.has_label.numpy().tobytes(), zlib.crc32(self.places.numpy().tobytes())
        )


class RowsPass(NamedTuple):
    """Holds what a forward pass over a shard has to know of the whole rows that it was cut from."""

    num_items: float | None
    """What the sum of token losses is divided by, `num_items_in_batch`; None: by their number."""
    spans: tuple[tuple[int, int], ...]
    """(first, one past the last) column of each row's tokens in the batch."""
    length: int
    """Columns of the batch."""
    is_packed: bool
    """Whether all rows were joined into one."""
    least_id: int
    """The smallest token."""
    wanted: Wanted = "loss"
    columns: tuple[int, ...] | None = None
    """Columns of the batch whose logits are wanted; None: all of them."""
    scores: HeadScores = HeadScores()
    """How `scores` are made."""
    images: str = ""
    """Sizes and a checksum of its images, where the model embeds whole rows with images in them,
    and the decoder cuts them."""
    image_spans: tuple[tuple[int, int], ...] = ()
    """Where images are whose tokens see each other in both directions."""
    only_windows_see_ahead: bool = False
    """Whether they do so in layers with a window alone, as in Gemma 4."""
    shared: SharedTokens | None = None
    """Where tokens are, if rows share their beginnings; None: rows are apart."""


def read_rows(given: Mapping[str, Any], stock: StockModel) -> WholeRows:
    """Returns what the arguments of a forward pass say about its rows.

    Args:
        given: `input_ids` `[B, L]`; `labels` `[B, L]` or None, unshifted; `attention_mask`
            `[B, L]`, 1 for the tokens of a row, which are neighbours, and 0 for padding;
            `position_ids` `[B, L]` or `[1, L]`, which count from 0 in each document;
            `cu_seq_lens_q`, where documents of one row begin and end; `seq_lengths`, the lengths
            of each row's documents.
        stock: the model before it was patched.

    Raises:
        ValueError: a row's tokens are not neighbours, what is given contradicts itself, or
            transformers reads it in another way.
    """
    ids = _two_dimensional("input_ids", given.get("input_ids"))
    labels = given.get("labels")
    labels = torch.full(ids.shape, IGNORE_INDEX) if labels is None else labels.cpu()
    if labels.shape != ids.shape:
        raise ValueError(
            f"labels {list(labels.shape)} for input_ids {list(ids.shape)}: whole rows have one "
            "unshifted label for each token."
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"labels of {labels.dtype}: cross-entropy takes int64. Use labels.long().")
    spans = _spans(given.get("attention_mask"), ids.shape)
    lengths = _documents(given, spans, ids.shape)
    rows = tuple(
        Row(row[start:stop], row_labels[start:stop], documents)
        for row, row_labels, (start, stop), documents in zip(
            ids, labels, spans, lengths, strict=True
        )
    )
    check_labels(labels, spans, lengths)
    found = WholeRows(rows, tuple(spans), ids.shape[1])
    check_read_alike(given, spans, lengths, stock)
    return found


def _two_dimensional(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != 2 or not value.numel():
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: {shape}, but whole rows are a tensor [rows, tokens].")
    return value.cpu()


def _spans(mask: Any, shape: torch.Size) -> list[tuple[int, int]]:
    """(first, one past the last) column of each row's tokens."""
    if mask is None:
        return [(0, shape[1])] * shape[0]
    if not isinstance(mask, Tensor) or mask.shape != shape:
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask {found} for input_ids {list(shape)}: padding is marked in a mask of "
            "their shape; other masks go to patch(model, config, mask=...)."
        )
    mask = mask.cpu()
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            "attention_mask has values other than 0 and 1: it marks padding here. Other masks go "
            "to patch(model, config, mask=...)."
        )
    is_real = mask.bool()
    spans = []
    for number, row in enumerate(is_real):
        real = row.nonzero()[:, 0]
        start, stop = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)
        if stop - start != len(real):
            raise ValueError(
                f"attention_mask of row {number} has a hole between columns {start} and {stop}: a "
                "row's tokens are neighbours, with padding on one side or both."
            )
        spans.append((start, stop))
    return spans


def _documents(
    given: Mapping[str, Any], spans: Sequence[tuple[int, int]], shape: torch.Size
) -> list[Lengths]:
    """Lengths of each row's documents, from whatever says them; all that do must agree."""
    said = {
        "seq_lengths": _by_seq_lengths(given.get("seq_lengths"), spans),
        "cu_seq_lens_q": _by_cu_seq_lens(given.get("cu_seq_lens_q"), spans),
        "position_ids": _by_positions(given.get("position_ids"), spans, shape),
        "seq_idx": _by_seq_idx(given.get("seq_idx"), spans, shape),
    }
    known = {name: lengths for name, lengths in said.items() if lengths is not None}
    if not known:
        return [(stop - start,) if stop > start else () for start, stop in spans]
    (first, lengths), *others = known.items()
    for name, theirs in others:
        if theirs != lengths:
            raise ContradictionError(
                f"{first} and {name} say different documents: {_short(lengths)} and "
                f"{_short(theirs)} tokens. Give one of them."
            )
    return lengths


def _by_seq_lengths(value: Any, spans: Sequence[tuple[int, int]]) -> list[Lengths] | None:
    if value is None:
        return None
    found = [tuple(int(length) for length in row if int(length)) for row in value]
    _check_sums("seq_lengths", found, spans)
    return found


def _by_cu_seq_lens(value: Any, spans: Sequence[tuple[int, int]]) -> list[Lengths] | None:
    if value is None:
        return None
    edges = [int(edge) for edge in value]
    if len(spans) != 1:
        raise ValueError(
            f"cu_seq_lens_q with {len(spans)} rows: it says where the documents of one row are."
        )
    found = [tuple(b - a for a, b in pairwise(edges))]
    _check_sums("cu_seq_lens_q", found if edges[:1] == [0] else [()], spans)
    return found


def _by_seq_idx(
    value: Any, spans: Sequence[tuple[int, int]], shape: torch.Size
) -> list[Lengths] | None:
    """Numbers of documents, one for each token."""
    if value is None:
        return None
    rows = torch.as_tensor(value).cpu()
    if rows.shape != shape:
        raise ValueError(f"seq_idx {list(rows.shape)} for input_ids {list(shape)}: one per token.")
    return [
        tuple(torch.unique_consecutive(row[start:stop], return_counts=True)[1].tolist())
        for row, (start, stop) in zip(rows, spans, strict=True)
    ]


def _by_positions(
    value: Any, spans: Sequence[tuple[int, int]], shape: torch.Size
) -> list[Lengths] | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] != shape[1]:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"position_ids {found} for input_ids {list(shape)}: one for each token.")
    rows = value.cpu().expand(shape)
    return [_starts_anew(row, start, stop) for row, (start, stop) in zip(rows, spans, strict=True)]


def _starts_anew(row: Tensor, start: int, stop: int) -> Lengths:
    """Lengths of the runs of positions that count up from 0.

    Right of padding they may also count from the first column of the row: attention then sees the
    same distances.
    """
    positions = row[start:stop]
    if start and torch.equal(positions, torch.arange(start, stop)):
        return (stop - start,)
    begins = (positions == 0).nonzero()[:, 0]
    edges = [*begins.tolist(), stop - start]
    lengths = tuple(b - a for a, b in pairwise(edges))
    wanted = [torch.arange(length) for length in lengths]
    if stop > start and not (wanted and torch.equal(torch.cat(wanted), positions)):
        raise ValueError(
            f"position_ids {positions[:6].tolist()}...: positions count up from 0 in each "
            "document. Leave them out, or give those of whole rows."
        )
    return lengths


def _check_sums(name: str, found: Sequence[Lengths], spans: Sequence[tuple[int, int]]) -> None:
    tokens = [stop - start for start, stop in spans]
    if [sum(lengths) for lengths in found] != tokens or any(n < 1 for row in found for n in row):
        raise ValueError(
            f"{name} {_short(found)} for rows of {_short(tokens)} tokens: the documents of a row "
            "have one token or more each and fill it."
        )


def _short(value: Sequence[Any]) -> str:
    text = str(list(value))
    return text if len(text) < 80 else f"{text[:77]}..."
