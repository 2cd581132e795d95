"""From tokenised rows to this rank's shard.

Every rank of a sequence group gets the same rows and keeps its own tokens. Labels are shifted over
the whole row before it is cut, so that the last token of a shard still learns from the first of
the next.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longctx_patch.config import LongContextConfig
from longctx_patch.layout import length_multiple, make_layout
from longctx_patch.loss import IGNORE_INDEX

SHARD_KEY = "longctx_shard"
"""`[B, 2]` int64: length of the padded sequence, and a checksum of the whole row."""


class SequenceShardCollator:
    """Pads rows to one length, shifts labels, and returns this rank's tokens.

    Args:
        config: the same on every rank.
        group_rank: this rank's place in its sequence group (`handle.group_rank`, or
            `world_place(config).group_rank`).
        pad_token_id: fills rows on the right. Padding has no label and, attention being causal, no
            influence on the tokens before it.
        pad_to_length: pad every batch to at least this many tokens (default: its longest row).

    A row is a mapping with `input_ids` and, optionally, `labels` of the same length (unshifted,
    -100 for tokens without loss). An `attention_mask` may only mark padding on the right, which is
    then dropped and padded anew.

    Returns:
        A batch of int64 tensors. `input_ids`, `position_ids`, `labels` and `shift_labels` are
        `[B, tokens of this rank]`; both label tensors are the shifted ones (transformers wants
        `labels` to be there and uses `shift_labels`). `longctx_shard` is read by the patched model.

    Example:
        >>> collate = SequenceShardCollator(LongContextConfig(), group_rank=0, pad_token_id=0)
        >>> collate([{"input_ids": [5, 6, 7]}])["shift_labels"].tolist()
        [[6, 7, -100]]
    """

    def __init__(
        self,
        config: LongContextConfig,
        *,
        group_rank: int,
        pad_token_id: int,
        pad_to_length: int = 0,
    ) -> None:
        if not 0 <= group_rank < config.sequence_degree:
            raise ValueError(
                f"group_rank={group_rank}: ulysses_degree x ring_degree = "
                f"{config.sequence_degree}, so it lies in 0..{config.sequence_degree - 1}. "
                "Use world_place(config).group_rank."
            )
        self.config = config
        self.group_rank = group_rank
        self.pad_token_id = pad_token_id
        self.pad_to_length = pad_to_length

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not rows:
            raise ValueError("a batch of no rows: give one row or more, the same on every rank.")
        parsed = [_parse(row, number) for number, row in enumerate(rows)]
        length = self._padded_length(max(len(ids) for ids, _ in parsed))
        input_ids = torch.stack([_pad(ids, length, self.pad_token_id) for ids, _ in parsed])
        labels = torch.stack([_pad(row, length + 1, IGNORE_INDEX) for _, row in parsed])
        shift_labels = labels[:, 1:]
        layout = make_layout(
            self.config.placement,
            length,
            ring=self.config.ring_degree,
            ulysses=self.config.ulysses_degree,
        )
        shard_labels = layout.shard(shift_labels, self.group_rank, 1)
        positions = layout.positions(self.group_rank)
        checksums = [
            zlib.crc32(ids.numpy().tobytes() + row.numpy().tobytes())
            for ids, row in zip(input_ids, shift_labels, strict=True)
        ]
        return {
            "input_ids": layout.shard(input_ids, self.group_rank, 1),
            "position_ids": positions.expand(len(rows), -1).contiguous(),
            "labels": shard_labels,
            "shift_labels": shard_labels.clone(),
            SHARD_KEY: torch.tensor([[length, checksum] for checksum in checksums]),
        }

    def _padded_length(self, longest: int) -> int:
        multiple = length_multiple(
            self.config.placement, ring=self.config.ring_degree, ulysses=self.config.ulysses_degree
        )
        wanted = max(longest, self.pad_to_length, 1)
        return -(-wanted // multiple) * multiple


def _parse(row: Mapping[str, Any], number: int) -> tuple[Tensor, Tensor]:
    """(input_ids, labels), int64 `[length]`, without padding."""
    if not isinstance(row, Mapping) or "input_ids" not in row:
        has = (
            f"the keys {sorted(row)}" if isinstance(row, Mapping) else f"type {type(row).__name__}"
        )
        raise ValueError(
            f"row {number} has {has}: each row is a mapping with input_ids. Tokenise first."
        )
    if unknown := sorted(set(row) - {"input_ids", "labels", "attention_mask"}):
        raise ValueError(
            f"row {number} has {', '.join(unknown)}, which would be dropped: position_ids or "
            "document boundaries of packed rows are not supported, and attention would cross "
            "documents. Give one document per row, with input_ids, labels and attention_mask only."
        )
    ids = torch.as_tensor(row["input_ids"], dtype=torch.int64)
    given = row.get("labels")
    labels = ids if given is None else torch.as_tensor(given, dtype=torch.int64)
    if ids.ndim != 1 or labels.shape != ids.shape:
        raise ValueError(
            f"row {number}: input_ids {list(ids.shape)} and labels {list(labels.shape)} must be "
            "one-dimensional and equally long. Pass one row per example, unshifted labels."
        )
    if row.get("attention_mask") is None:
        return ids, labels
    mask = torch.as_tensor(row["attention_mask"]).bool()
    real = int(mask.sum())
    if mask.shape != ids.shape or not mask[:real].all():
        raise ValueError(
            f"row {number}: attention_mask must be as long as input_ids and mark padding on the "
            "right only. Left padding shifts positions; pad on the right, or don't pad at all."
        )
    return ids[:real], labels[:real]


def _pad(row: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - len(row)), value=value)
