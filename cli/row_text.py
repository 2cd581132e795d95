"""Rows of tokens as text, in which the tokens that are learned stand out."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import click
import numpy as np

from longctx_patch.loss.law import IGNORE_INDEX

SHOWN_TOKENS = 400
"""Most tokens of a row that are shown from the starts of its documents; and as many from their
ends."""
SHOWN_DOCUMENTS = 8
"""Most documents of a packed row that are shown."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All but line ends and tabs; and what turns the direction of writing."""

Decode = Callable[[Any], str]
Mark = Callable[[str], str]


def green(text: str) -> str:
    """Returns how learned tokens are marked with colours."""
    return click.style(text, fg="green")


def braced(text: str) -> str:
    """Returns how learned tokens are marked without colours."""
    return f"{{+{text}+}}"


def shown(rows: Sequence[Any], decode: Decode, number: int, seed: int, mark: Mark) -> Iterator[str]:
    """Some rows, in their order. `mark`: what learned tokens become."""
    places = np.random.default_rng(seed).permutation(len(rows))[:number]
    for place in sorted(places.tolist()):
        yield f"\nrow {place}{_text(rows[place], partial(_escaped, decode), mark)}"


def _escaped(decode: Decode, ids: Any) -> str:
    """Text that can't change the terminal: its control characters by their codes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), decode(ids))


def _text(row: Mapping[str, Any], decode: Decode, mark: Mark) -> str:
    if "prompt_ids" in row:
        return f":\n{_pair(row, decode)}"
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    lengths = row.get("seq_lengths") or [len(ids)]
    if len(lengths) == 1:
        return f":\n{_document(decode, ids, labels, SHOWN_TOKENS, mark)}"
    lines = [f", {len(ids):,} tokens of {len(lengths):,} documents:"]
    spans = list(pairwise(accumulate(lengths, initial=0)))[:SHOWN_DOCUMENTS]
    for number, (start, stop) in enumerate(spans, start=1):
        most = SHOWN_TOKENS // len(spans)
        text = _document(decode, ids[start:stop], labels[start:stop], most, mark)
        lines.append(f"-- document {number}, {stop - start:,} tokens\n{text}")
    if len(lengths) > len(spans):
        lines.append(f"-- {len(lengths) - len(spans):,} more documents")
    return "\n".join(lines)


def _pair(row: Mapping[str, Any], decode: Decode) -> str:
    prompt, chosen, rejected = (
        decode(row[name][:SHOWN_TOKENS]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")
    )
    return (
        f"{prompt}\n{click.style('chosen:', fg='green')} {chosen}\n"
        f"{click.style('rejected:', fg='red')} {rejected}"
    )


def _document(decode: Decode, ids: list[int], labels: list[int], most: int, mark: Mark) -> str:
    """A document's text; of a long one the first and the last `most` tokens."""
    learned = [
        False,
        *(label != IGNORE_INDEX for label in labels[1:]),
    ]  # nothing predicts the first
    if len(ids) <= 2 * most:
        return _runs(decode, ids, learned, mark)
    left_out = f"\n... {len(ids) - 2 * most:,} tokens left out ...\n"
    first, last = slice(most), slice(-most, None)
    return (
        _runs(decode, ids[first], learned[first], mark)
        + left_out
        + _runs(decode, ids[last], learned[last], mark)
    )


def _runs(decode: Decode, ids: list[int], learned: list[bool], mark: Mark) -> str:
    """Text of neighbouring tokens together, so that words of several tokens are whole."""
    edges = [n for n in range(1, len(ids)) if learned[n] != learned[n - 1]]
    parts = []
    for start, stop in pairwise([0, *edges, len(ids)]):
        text = decode(ids[start:stop])
        parts.append(mark(text) if learned[start] else text)
    return " ".join(parts) if _splits_words(decode, ids) else "".join(parts)


def _splits_words(decode: Decode, ids: list[int]) -> bool:
    """Says whether a tokenizer puts a space between tokens when it joins them."""
    return len(ids) > 1 and decode(ids[:2]) == f"{decode(ids[:1])} {decode(ids[1:2])}"
