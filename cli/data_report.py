"""What `longctx data` prints of a run's tables of rows."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from longctx_patch.cli.text_table import aligned
from longctx_patch.data import pack_lengths
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.recipes.data.token_table import lengths_of
from longctx_patch.recipes.trl_data import RunData

BARS = 40
"""Characters of the longest bar."""
SHOWN_TOKENS = 400
"""Most tokens of a row that are shown, from its start; and as many from its end."""


def render(data: RunData, file: Path) -> str:
    """The report, and the next command."""
    lines = [f"{file}: rows of {data.reading.seq_len} tokens at most, of {data.reading.kind}", ""]
    for name, table in (("train", data.train), ("eval", data.evaluation)):
        if table is not None:
            lines += [f"{name}:", *_summary(data, table), ""]
    lines += ["tokens of a row (train):", *_histogram(lengths_of(data.train)), ""]
    launch = ["accelerate", "launch", "--config_file", str(file.parent / "accelerate.yaml")]
    launch += ["-m", f"longctx_patch.recipes.{file.stem}", "--config", str(file)]
    return "\n".join([*lines, f"The run finds these rows made:\n  {shlex.join(launch)}"])


def _summary(data: RunData, table: Any) -> list[str]:
    lengths = lengths_of(table)
    rows = [("rows", f"{len(table):,}", f"{int(lengths.sum()):,} tokens")]
    if data.reading.kind != "preference":
        learned = _num_learned(table)
        share = learned / max(1, int(lengths.sum()))
        rows.append(("learned", f"{learned:,}", f"{share:.1%} of the tokens"))
    num_cut = np.asarray(table.with_format("numpy")["num_cut"][:])
    if num_cut.any():
        rows.append(("cut off", f"{int(num_cut.sum()):,}", f"of {int((num_cut > 0).sum()):,} rows"))
    if data.packing:
        packed, fill = packing_of(lengths, data.reading.seq_len)
        rows.append(("packed", f"{packed:,}", f"rows, {fill:.1%} full"))
    return [f"  {line}" for line in aligned(rows)]


def packing_of(lengths: np.ndarray, seq_len: int) -> tuple[int, float]:
    """(number of packed rows, how full they are on the average), by best fit."""
    filled = [int(lengths[row].sum()) for row in pack_lengths(map(int, lengths), seq_len)]
    return len(filled), sum(filled) / (len(filled) * seq_len)


def _num_learned(table: Any) -> int:
    """Tokens that are predicted: labels, but for the first of each row."""
    total = 0
    for batch in table.with_format("arrow").iter(batch_size=1000):
        for labels in batch["labels"]:
            values = labels.values.to_numpy(zero_copy_only=False)
            total += int((values[1:] != IGNORE_INDEX).sum())
    return total


def _histogram(lengths: np.ndarray) -> list[str]:
    """Bars over lengths, each twice as long as the one before."""
    edges = [1]
    while edges[-1] <= lengths.max():
        edges.append(2 * edges[-1])
    counts, _ = np.histogram(lengths, bins=edges)
    first = int(np.flatnonzero(counts)[0])
    rows = [
        (f"{low:,} to {high - 1:,}", "#" * -(-BARS * int(count) // int(counts.max())), f"{count:,}")
        for low, high, count in list(zip(edges, edges[1:], counts, strict=False))[first:]
    ]
    middle = ", ".join(f"{p} %: {int(np.percentile(lengths, p)):,}" for p in (50, 90, 99))
    return [
        *(f"  {line}" for line in aligned(rows)),
        f"  so many per cent are no longer than: {middle}; longest {int(lengths.max()):,}",
    ]


def shown(data: RunData, number: int, seed: int) -> Iterator[str]:
    """Some rows as text, the tokens that are learned in green."""
    size = len(data.train)
    places = np.random.default_rng(seed).permutation(size)[:number]
    for place in sorted(places.tolist()):
        row = data.train[place]
        yield f"\nrow {place}:\n{_coloured(data, row)}"


def _coloured(data: RunData, row: dict[str, Any]) -> str:
    decode = data.reading.tokenizer.decode
    if data.reading.kind == "preference":
        prompt, chosen, rejected = (
            decode(row[name][:SHOWN_TOKENS])
            for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        )
        return (
            f"{prompt}\n{click.style('chosen:', fg='green')} {chosen}\n"
            f"{click.style('rejected:', fg='red')} {rejected}"
        )
    ids, labels = row["input_ids"], row["labels"]
    if len(ids) <= 2 * SHOWN_TOKENS:
        return _runs(decode, ids, labels)
    left_out = f"\n... {len(ids) - 2 * SHOWN_TOKENS:,} tokens left out ...\n"
    first, last = slice(SHOWN_TOKENS), slice(-SHOWN_TOKENS, None)
    return (
        _runs(decode, ids[first], labels[first]) + left_out + _runs(decode, ids[last], labels[last])
    )


def _runs(decode: Any, ids: list[int], labels: list[int]) -> str:
    """Text of neighbouring tokens together, so that words of several tokens are whole."""
    edges = [n for n in range(1, len(ids)) if (labels[n] < 0) != (labels[n - 1] < 0)]
    parts = []
    for start, stop in zip([0, *edges], [*edges, len(ids)], strict=True):
        text = decode(ids[start:stop])
        parts.append(click.style(text, fg="green") if labels[start] >= 0 else text)
    return " ".join(parts) if _splits_words(decode, ids) else "".join(parts)


def _splits_words(decode: Any, ids: list[int]) -> bool:
    """Whether a tokenizer puts a space between tokens when it joins them."""
    return len(ids) > 1 and decode(ids[:2]) == f"{decode(ids[:1])} {decode(ids[1:2])}"
