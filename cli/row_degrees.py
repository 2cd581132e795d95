"""Degrees for rows in which tokens see little: documents that are packed, layers with a window."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from longctx_patch.cli.degrees import DegreeChoice
from longctx_patch.cli.layer_masks import windows_of
from longctx_patch.costs import Workload
from longctx_patch.data import pack_rows
from longctx_patch.degrees import Way, preferred, seconds_of_ways
from longctx_patch.documents import Documents
from longctx_patch.plans import Hardware
from longctx_patch.recipes import models, texts
from longctx_patch.recipes.settings import Settings

TYPICAL_TOKENS = 2048
"""Of a document, where no text says how long they are."""
MOST_DOCUMENTS = 512
"""Of the text that are looked at, and as many rows' worth of tokens as `NUM_ROWS`."""
NUM_ROWS = 2
CHARACTERS = 8
"""Of a document for each token of a row that are looked at: few tokens have more."""


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
    windows = Counter(w if w and w < settings.seq_len else None for w in windows_of(model_config))
    if degrees.sequence_degree == 1 or not (settings.pack or any(windows)):
        return degrees
    rows = _rows(settings, has_text) if settings.pack else [()]
    layers = Counter[Workload]()
    for lengths in rows:
        for window, count in windows.items():
            layers[_workload(settings.seq_len, model_config, lengths, window)] += count
    seconds = {
        way: found / (len(rows) * windows.total())
        for way, found in seconds_of_ways(layers, hardware, degrees.sequence_degree).items()
        if way.layout is None or settings.attention_kept == 1  # which places tokens by itself
    }
    best, usual = preferred(seconds), Way(degrees.ulysses, degrees.ring)
    if best == usual:
        return degrees
    what = f"a row of {len(rows[0])} documents" if settings.pack else "layers with a window"
    reason = f"for {what}, predicted: {_named(best, seconds)}, {_named(usual, seconds)}"
    if settings.pack and not has_text:
        reason += f"; documents of {TYPICAL_TOKENS} tokens assumed, --data would tell"
    return replace(
        degrees, ulysses=best.ulysses, ring=best.ring, layout=best.layout or "auto", reason=reason
    )


def _named(way: Way, seconds: dict[Way, float]) -> str:
    return f"{way.ulysses} x {way.ring} takes {1e3 * seconds[way]:.3g} ms a layer"


def _workload(
    seq_len: int, model_config: Any, lengths: tuple[int, ...], window: int | None
) -> Workload:
    heads = model_config.num_attention_heads
    return Workload(
        num_tokens=seq_len,
        num_heads=heads,
        num_kv_heads=model_config.num_key_value_heads,
        head_dim=getattr(model_config, "head_dim", None) or model_config.hidden_size // heads,
        lengths=lengths,
        window=window,
    )


def _rows(settings: Settings, has_text: bool) -> Sequence[tuple[int, ...]]:
    """Lengths of the documents of some rows, packed as the recipe does."""
    typical = Documents.typical(settings.seq_len, TYPICAL_TOKENS).lengths
    if not has_text:
        return [typical]
    documents = ({"input_ids": tokens} for tokens in _first_documents(settings))
    packed = pack_rows(documents, settings.seq_len, too_long="split")
    try:
        return [tuple(row["seq_lengths"]) for row in islice(packed, NUM_ROWS)] or [typical]
    except ValueError as error:
        raise ValueError(f"--data (`--text` of the recipe): {error}") from error


def _first_documents(settings: Settings) -> Iterator[Any]:
    """int32 tokens of each, until there are enough to see how long they are."""
    tokenizer, total = models.load_tokenizer(settings), 0
    documents = texts.read_documents(settings.text, settings.text_field)
    for document in islice(documents, MOST_DOCUMENTS):
        tokens = texts.tokens_of(document[: CHARACTERS * settings.seq_len], tokenizer)
        yield tokens
        total += len(tokens)
        if total >= NUM_ROWS * settings.seq_len:
            return
