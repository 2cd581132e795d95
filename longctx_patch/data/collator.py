"""A collator that turns tokenised rows into this rank's shard.

Every rank of a sequence group gets the same rows and keeps its own tokens. Labels are shifted over
the whole row before it is cut, so that the last token of a shard still learns from the first of
the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longctx_patch.config import LongContextConfig
from longctx_patch.data.descriptor import SHARD_KEY, Cut, describe
from longctx_patch.data.rows import Row, join_rows, parse_row
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.sequence.documents import Documents


class SequenceShardCollator:
    """Pads rows to one length, shifts labels, and returns this rank's tokens.

    Packed rows are joined into one: all documents of all rows one after another, so that a batch
    has one mask. Attention, positions and labels stay within documents, and the loss is the sum
    over them.

    Args:
        config: the same on every rank.
        group_rank: this rank's place in its sequence group (`handle.group_rank`, or
            `world_place(config).group_rank`).
        pad_token_id: fills rows on the right. Padding has no label and, attention being causal, no
            influence on the tokens before it.
        pad_to_length: pad every batch to at least this many tokens (default: its longest row).
        packed: also join rows of one document each, instead of padding them to the longest.

    A row is a mapping with `input_ids` and, optionally, `labels` of the same length (unshifted,
    -100 for tokens without loss), and `seq_lengths`: the lengths of the documents packed in it
    (`pack_rows` and TRL give them). An `attention_mask` may only mark padding on the right, which
    is then dropped and padded anew.

    A row with `branches` is a prompt, `input_ids`, and what goes on from it: a list of mappings
    with `input_ids` and, optionally, `labels`. Loss and gradients are those of a row for each
    branch, prompt and branch, without loss on the prompt; but the prompt, without its last token,
    is in the batch once, then its last token and a branch, for each of them. `seq_parents` says the
    same of packed documents (`pack_rows` gives it), in any number of levels: the number of the
    earlier document that each one goes on from, or -1.

    Returns:
        A batch of int64 tensors. `input_ids`, `position_ids`, `labels` and `shift_labels` are
        `[B, tokens of this rank]`, with B = 1 for packed rows and rows with branches; positions
        count from the start of each document, and of a branch from the end of its prompt. Both
        label tensors are shifted (transformers requires `labels` and uses `shift_labels`).
        `longctx_shard` is read by the patched model.

    Example:
        >>> collate = SequenceShardCollator(LongContextConfig(), group_rank=0, pad_token_id=0)
        >>> collate([{"input_ids": [5, 6, 7]}])["shift_labels"].tolist()
        [[6, 7, -100]]
        >>> pair = {"input_ids": [5, 6], "branches": [{"input_ids": [7]}, {"input_ids": [8, 9]}]}
        >>> batch = collate([pair])
        >>> batch["input_ids"].tolist(), batch["shift_labels"].tolist()
        ([[5, 6, 7, 6, 8, 9]], [[-100, 7, -100, 8, 9, -100]])

    Raises ValueError for rows that can't be computed: among them an empty branch, and labels of
    what branches share, which would count once and not once for each branch.
    """

    def __init__(
        self,
        config: LongContextConfig,
        *,
        group_rank: int,
        pad_token_id: int,
        pad_to_length: int = 0,
        packed: bool = False,
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
        self.packed = packed

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not rows:
            raise ValueError("a batch of no rows: give one row or more, the same on every rank.")
        return self.shard([parse_row(row, number) for number, row in enumerate(rows)])

    def shard(self, parsed: Sequence[Row]) -> dict[str, Tensor]:
        """The same for rows that have been read."""
        if len(parsed) > 1 and (self.packed or any(len(row.lengths) > 1 for row in parsed)):
            parsed = [join_rows(parsed)]
        length = self._padded_length(parsed)
        documents = Documents.of_row(parsed[0].lengths, length, parsed[0].parents)
        input_ids = torch.stack([_pad(row.ids, length, self.pad_token_id) for row in parsed])
        labels = torch.stack([_pad(row.next_labels(), length, IGNORE_INDEX) for row in parsed])
        layout = self.config.layout_of(documents)
        shard_labels = layout.shard(labels, self.group_rank, 1)
        positions = documents.positions(layout.positions(self.group_rank))
        return {
            "input_ids": layout.shard(input_ids, self.group_rank, 1),
            "position_ids": positions.expand(len(parsed), -1).contiguous(),
            "labels": shard_labels,
            "shift_labels": shard_labels.clone(),
            SHARD_KEY: describe(parsed, self._cut(documents), length, input_ids, labels),
        }

    def _cut(self, documents: Documents) -> Cut:
        config = self.config
        name = config.placement_of(documents)
        return Cut.of(self.group_rank, config.ulysses_degree, config.ring_degree, name)

    def _padded_length(self, rows: Sequence[Row]) -> int:
        multiple = self.config.padding_multiple(packed=len(rows[0].lengths) > 1)
        wanted = max(*(len(row.ids) for row in rows), self.pad_to_length, 1)
        return -(-wanted // multiple) * multiple


def _pad(row: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - len(row)), value=value)
