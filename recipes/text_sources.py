"""Makes a run's rows of its sources of text: each once, or as often as shares of sources, or of
long and short documents, ask."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.records import NoRecords
from longctx_patch.recipes.data.sealed import Arrays, shared_arrays
from longctx_patch.recipes.data.sources import check_apart, check_evaluation
from longctx_patch.recipes.data.text_reading import TextReading
from longctx_patch.recipes.data.token_stream import TokenStream
from longctx_patch.recipes.data.token_table import losses_of, table_of
from longctx_patch.recipes.mixture import read_mixture
from longctx_patch.recipes.settings import Settings
from longctx_patch.recipes.text_rows import (
    NO_TEXT,
    Pieces,
    Share,
    TextRows,
    joined_rows,
    packed_rows,
    rows_by_length,
    single_rows,
)

MIXING = 1
"""Goes up when the same sources and shares give other rows than before."""


def rows_of_run(settings: Settings, tokenizer: Any) -> TextRows:
    """The rows of a run, whose tokens are made by one process of each machine, or found made.

    Raises ValueError for sources that are not there, records without text, less text than a row;
    with shares for each source by itself.
    """
    check_apart(settings.output, settings.text)
    reading = TextReading(tokenizer, settings.text_field)
    cut = partial(_cutting(settings), seq_len=settings.seq_len)
    if settings.mixture:
        mixture, seq_len = read_mixture(settings.mixture), settings.seq_len
        stream = stream_of(settings.text, reading)
        each = rows_by_length(stream, seq_len, mixture.least_of(seq_len))
        return mixed_rows(each, (mixture.long, mixture.short), [rows.summary for rows in each])
    if not settings.data_shares:
        return cut(stream_of(settings.text, reading))
    rows = [_rows_of_source(source, reading, cut) for source in settings.text]
    return mixed_rows(rows, settings.data_shares, settings.text)


def evaluation_rows(settings: Settings, tokenizer: Any) -> TextRows | None:
    """The rows that a run evaluates on, cut as those that it trains on; None: it has none.

    Raises ValueError as `rows_of_run`, and for sources that are trained on.
    """
    if not settings.eval_data:
        return None
    check_apart(settings.output, settings.eval_data)
    check_evaluation(settings.text, settings.eval_data)
    reading = TextReading(tokenizer, settings.text_field)
    try:
        return _cutting(settings)(stream_of(settings.eval_data, reading), settings.seq_len)
    except ValueError as error:
        raise ValueError(f"eval_data: {error}") from error


def _cutting(settings: Settings) -> Callable[..., TextRows]:
    if settings.pack:
        return packed_rows
    return single_rows if settings.one_document_per_row else joined_rows


def _rows_of_source(
    source: str, reading: TextReading, cut: Callable[[TokenStream], TextRows]
) -> TextRows:
    try:
        return cut(stream_of([source], reading))
    except ValueError as error:
        raise ValueError(f"{source}, which has one of data_shares: {error}") from error


def stream_of(sources: Sequence[str], reading: TextReading) -> TokenStream:
    """The documents of all sources, as tokens. Raises ValueError without any."""
    num_proc = max(1, (os.cpu_count() or 1) // 2)
    tables, losses = [], list[Losses]()
    for source in sources:
        try:
            tables.append(table_of(source, reading, num_proc=num_proc))
            losses.append(losses_of(tables[-1]))
        except NoRecords as error:
            if not error.losses.num_records:
                raise
            losses.append(error.losses)
    if not tables:
        raise ValueError(NO_TEXT)
    return TokenStream(tables, Losses.joined(losses))


def mixed_rows(
    sources: Sequence[TextRows], shares: Sequence[float], names: Sequence[str]
) -> TextRows:
    """Rows of all sources, each as often that it has its share of all tokens, to within one row.
    Sources of one stream are kinds of its documents.

    Of the source that has most rows for its share each row is there once; rows of the others are
    there once or more, in turn.

    Args:
        sources: all cut in the same way.
        shares: numbers above 0, which need not add up to 1.
        names: of the sources.
    """
    stream, seq_len = sources[0].stream, sources[0].seq_len
    begins = [0] * len(sources)
    if any(rows.stream is not stream for rows in sources):
        stream = TokenStream.joined([rows.stream for rows in sources])
        begins = [0, *accumulate(len(rows.stream) for rows in sources[:-1])]
    digests = "".join(rows.digest() for rows in sources)
    what = repr((MIXING, seq_len, digests, [*shares], begins))
    key = hashlib.sha256(what.encode()).hexdigest()[:32]
    drawing = partial(_drawn, sources, shares, begins)
    made = shared_arrays(key, ("starts", "lengths", "edges"), drawing)
    pieces = Pieces(made["starts"], made["lengths"])
    edges = None if sources[0].edges is None else made["edges"]
    drawn = TextRows(stream, seq_len, pieces, edges)
    found, before = list[Share](), 0
    for name, rows, number in zip(names, sources, draws(sources, shares), strict=True):
        mine = int(drawn.lengths()[before : before + number].sum(dtype=np.int64))
        of_all = mine / drawn.num_tokens
        found.append(Share(name, mine, of_all, len(rows), number / len(rows)))
        before += number
    left_out = sum(rows.num_left_out for rows in sources)
    summary = "; ".join(map(str, found))
    return replace(drawn, summary=summary, shares=tuple(found), num_left_out=left_out)


def _drawn(sources: Sequence[TextRows], shares: Sequence[float], begins: Sequence[int]) -> Arrays:
    """The pieces of the drawn rows in the joined stream, where sources begin as `begins` says, and
    the rows' edges in them."""
    starts, lengths, counts = [], [], []
    for rows, times, before in zip(sources, draws(sources, shares), begins, strict=True):
        by_row = rows.pieces_by_row()
        which = np.arange(times) % len(rows)
        counts.append(by_row[which])
        pieces = _spans((np.cumsum(by_row) - by_row)[which], by_row[which])
        starts.append(rows.pieces.starts[pieces] + before)
        lengths.append(rows.pieces.lengths[pieces])
    edges = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return {"starts": np.concatenate(starts), "lengths": np.concatenate(lengths), "edges": edges}


def draws(sources: Sequence[TextRows], shares: Sequence[float]) -> list[int]:
    """Counts how many rows of each source are drawn: all of them at least."""
    sizes = np.array([len(rows) for rows in sources])
    per_row = np.array(shares) / ([rows.num_tokens for rows in sources] / sizes)
    wanted = per_row * (sizes / per_row).max()
    return [int(number) for number in np.maximum(sizes, np.rint(wanted).astype(np.int64))]


def _spans(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers `first` to before `first + count`, of all one after another."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(firsts, counts) + within
