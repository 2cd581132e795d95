"""Degrees for rows in which tokens see little: documents that are packed, layers with a window."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from longctx_patch.choose.degrees import Way, costs_of_ways
from longctx_patch.choose.tie import preferred
from longctx_patch.cli.degrees import DegreeChoice
from longctx_patch.data import pack_rows
from longctx_patch.hf.model.facts import ModelFacts
from longctx_patch.predict.attention.costs import Workload
from longctx_patch.predict.machines import Hardware
from longctx_patch.recipes import models, texts
from longctx_patch.recipes.settings import Settings
from longctx_patch.sequence.documents import Documents

TYPICAL_TOKENS = 2048
"""Of a document, where no text says how long they are."""
MOST_DOCUMENTS, MOST_TOKENS = 512, 2**20
"""Of the text that are looked at."""
NUM_ROWS, PACKED_ROWS = 2, 4
"""Of so many that are packed, those that are looked at."""
PIECE = 2**17
"""Characters that are tokenised at once: of a long document only the first matter."""


class _Rows(NamedTuple):
    """Lengths of the documents of some rows; none: rows that are not packed."""

    lengths: list[tuple[int, ...]]
    assumed: str = ""
    """Why, if the text did not say."""


def degrees_for_rows(
    degrees: DegreeChoice,
    settings: Settings,
    model_config: Any,
    hardware: Hardware,
    *,
    has_text: bool,
) -> DegreeChoice:
    """Those that the cost model takes for attention; the same where each token sees all before it.

    `degrees`: chosen by the heads alone. `hardware`: with as many GPUs in a node as there are.
    """
    facts = ModelFacts.of(model_config)
    windows = Counter(facts.windows_in(settings.seq_len))
    if degrees.sequence_degree == 1 or not (settings.pack or any(windows)):
        return degrees
    rows = _rows(settings, has_text=has_text) if settings.pack else _Rows([()])
    layers = Counter[Workload]()
    for lengths in rows.lengths:
        for window, count in windows.items():
            layers[_workload(settings.seq_len, facts, lengths, window)] += count
    config = settings.sequence_parallelism()
    costs = costs_of_ways(layers, hardware, degrees.sequence_degree, config)
    num_layers = len(rows.lengths) * windows.total()
    seconds = {way: cost.seconds / num_layers for way, cost in costs.items()}
    best = preferred(costs)
    others = sorted(seconds.keys() - {best}, key=lambda way: seconds[way])
    counts = sorted({len(lengths) for lengths in rows.lengths})
    parts = [f"rows of {' or '.join(map(str, counts))} documents"] if settings.pack else []
    parts += ["layers with a window"] if any(windows) else []
    times = ", ".join(_named(way, seconds) for way in (best, *others[:2]))
    reason = f"for {' and '.join(parts)} on {hardware.name.upper()}, a layer predicted: {times}"
    if rows.assumed:
        reason += f"; documents of {TYPICAL_TOKENS} tokens assumed: {rows.assumed}"
    return replace(
        degrees,
        ulysses=best.ulysses,
        ring=best.ring,
        layout=best.layout or degrees.layout,
        reason=reason,
    )


def _named(way: Way, seconds: dict[Way, float]) -> str:
    layout = f" {way.layout}" if way.layout else ""
    return f"{way.ulysses} x {way.ring}{layout} {1e3 * seconds[way]:.3g} ms"


def _workload(
    seq_len: int, facts: ModelFacts, lengths: tuple[int, ...], window: int | None
) -> Workload:
    return Workload(
        num_tokens=seq_len,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        lengths=lengths,
        window=window,
    )


def _rows(settings: Settings, *, has_text: bool) -> _Rows:
    """Full rows of documents as long as the first of the text."""
    why = "--data would tell"
    if has_text:
        try:
            found = list(_first_lengths(settings))
        except (ValueError, OSError, ImportError) as error:
            why = f"the text can't be read as it is ({' '.join(str(error).split())})"
        else:
            if found:
                return _Rows(_packed(found, settings.seq_len))
            why = "the text is empty"
    return _Rows([Documents.typical(settings.seq_len, TYPICAL_TOKENS).lengths], why)


def _first_lengths(settings: Settings) -> Iterator[int]:
    """Tokens of each of the first documents, a row's at most."""
    tokenizer, total = models.load_tokenizer(settings), 0
    most = min(settings.seq_len, MOST_TOKENS)
    documents = texts.read_documents(settings.text, settings.text_field)
    for document in islice(documents, MOST_DOCUMENTS):
        length = 0
        for start in range(0, len(document), PIECE):
            length += len(texts.tokens_of(document[start : start + PIECE], tokenizer))
            if length >= most:
                break
        yield min(length, most)
        total += length
        if total >= MOST_TOKENS:
            return


def _packed(lengths: list[int], seq_len: int) -> list[tuple[int, ...]]:
    """Some rows that the recipe would make of documents as long, again and again."""
    times = ceil(PACKED_ROWS * seq_len / sum(lengths))
    documents = ({"input_ids": np.zeros(n, np.int32)} for n in times * lengths)
    rows = [tuple(row["seq_lengths"]) for row in pack_rows(documents, seq_len)]
    full = rows[:-1] or rows  # the last one has what is left
    return full[:: ceil(len(full) / NUM_ROWS)]
