"""Rows of several sources of text: each once, or as often as shares of the tokens ask. These are of
sources, or of long and short documents."""

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.recipes.mixture import PRESETS, read_mixture
from longctx_patch.recipes.models import byte_tokenizer
from longctx_patch.recipes.row_order import RowOrder
from longctx_patch.recipes.text_rows import TextRows
from longctx_patch.recipes.text_sources import rows_of_run
from tests.recipes.conftest import settings_of, write_records

SEQ_LEN = 8
CUTS: dict[str, dict[str, Any]] = {
    "joined": {},
    "documents": {"one_document_per_row": True},
    "packed": {"pack": True},
}
LETTERS = "abc"
DOCUMENTS = {"a": (3, 30, 9, 1), "b": (5,) * 9, "c": (100, 2, 2, 21)}
"""Characters of each source's documents, which are one letter over and over."""


def rows_of(folder: Path, how: str = "joined", letters: str = LETTERS, **more: Any) -> TextRows:
    sources = []
    for letter in letters:
        records = ({"text": letter * n} for n in DOCUMENTS[letter])
        sources.append(write_records(folder / f"{letter}.jsonl", records))
    asked = CUTS[how] | more | {"text": list(map(str, sources)), "output": str(folder / "out")}
    return rows_of_run(settings_of(seq_len=SEQ_LEN, **asked), byte_tokenizer())


def as_text(rows: TextRows) -> list[str]:
    return [byte_tokenizer().decode(row["input_ids"]) for row in rows]


def letter_of(row: str) -> str:
    """The source of a row, of which each has documents of one source alone."""
    (letter,) = set(row.replace("<eos>", ""))
    return letter


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("shares", [[1.0, 1.0, 1.0], [0.2, 0.7, 0.1], [5.0, 1.0, 30.0]])
def test_each_source_has_its_share_of_the_tokens(
    tmp_path: Path, how: str, shares: list[float]
) -> None:
    rows = rows_of(tmp_path, how, data_shares=shares)
    alone = {letter: as_text(rows_of(tmp_path, how, letter)) for letter in LETTERS}
    found = Counter(as_text(rows))
    assert set(found) == {row for texts in alone.values() for row in texts}
    tokens = Counter[str]()
    for row, text in zip(rows, as_text(rows), strict=True):
        tokens[letter_of(text)] += len(row["input_ids"])
    for share, letter in zip(shares, LETTERS, strict=True):
        wanted = share / sum(shares) * rows.num_tokens
        assert abs(tokens[letter] - wanted) <= 1.5 * SEQ_LEN, letter
    # Nothing is drawn more often than need be: of one source each row is there once.
    times = {
        letter: [found[row] / count for row, count in Counter(texts).items()]
        for letter, texts in alone.items()
    }
    assert any(set(each) == {1.0} for each in times.values())
    # Rows of a source are there equally often, to within one.
    assert all(max(each) - min(each) <= 1 for each in times.values())


def test_what_is_said_of_shares_is_so(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, data_shares=[1, 2, 1])
    by_letter = Counter(letter_of(text) for text in as_text(rows))
    for share, letter in zip(rows.shares, LETTERS, strict=True):
        assert share.source == str(tmp_path / f"{letter}.jsonl")
        assert share.num_tokens == SEQ_LEN * by_letter[letter]
        assert share.of_all == pytest.approx(by_letter[letter] / len(rows))
        assert share.times == pytest.approx(by_letter[letter] / share.num_rows)
        assert str(share) in rows.summary
    assert rows_of(tmp_path).shares == ()


def test_shares_are_part_of_what_a_run_trains_on(tmp_path: Path) -> None:
    one, other = ([1.0, 2.0, 1.0], [1.0, 3.0, 1.0])
    digests = [rows_of(tmp_path, data_shares=shares).digest() for shares in (one, other, one)]
    assert digests[0] == digests[2] != digests[1]
    assert rows_of(tmp_path).digest() not in digests


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        ([1.0], "1 data_shares for 2 sources"),
        ([1.0, 0.0], "each is a number above 0"),
        ([1.0, float("nan")], "each is a number above 0"),
        ([1.0, float("inf")], "each is a number above 0"),
    ],
)
def test_shares_that_cant_be_right(tmp_path: Path, shares: list[float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rows_of(tmp_path, letters="ab", data_shares=shares)


def test_a_source_with_a_share_has_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for texts in ((), (2,)):
        monkeypatch.setitem(DOCUMENTS, "b", texts)
        with pytest.raises(
            ValueError, match=r"b\.jsonl, which has one of data_shares: .*(text|no records)"
        ):
            rows_of(tmp_path, letters="ab", data_shares=[1, 1])


def pieces_of(rows: TextRows) -> list[list[str]]:
    """The documents of each row, or parts of them."""
    tokenizer, found = byte_tokenizer(), []
    for row in rows:
        ends = list(accumulate(row["seq_lengths"]))
        parts = zip([0, *ends], ends, strict=False)
        found.append([tokenizer.decode(row["input_ids"][start:end]) for start, end in parts])
    return found


@pytest.mark.parametrize(
    ("mixture", "least", "num_long"),
    [
        ("prolong", 8, 4),
        ("long=0.25,short=0.75,from=6", 6, 13),
        ("long=0.9,short=0.1,from=8", 8, 4),
    ],
)
def test_a_mixture_has_shares_of_long_documents_and_of_short_ones_packed(
    tmp_path: Path, mixture: str, least: int, num_long: int
) -> None:
    """A row has documents of one kind; together they are all documents, whatever their source."""
    rows = rows_of(tmp_path, mixture=mixture)
    found, all_tokens = pieces_of(rows), Counter[bool]()
    for row in found:
        (is_long,) = {length_of(part) >= least for part in row}
        all_tokens[is_long] += sum(map(length_of, row))
    shares = read_mixture(mixture)
    assert abs(all_tokens[True] - shares.long * rows.num_tokens) <= 1.5 * SEQ_LEN
    assert abs(all_tokens[False] - shares.short * rows.num_tokens) <= 1.5 * SEQ_LEN
    packed = pieces_of(rows_of(tmp_path, "packed"))
    wanted = {part for row in packed for part in row if length_of(part) > 1}
    assert {part for row in found for part in row} >= wanted
    for share, is_long in zip(rows.shares, (True, False), strict=True):
        assert share.num_tokens == all_tokens[is_long]
        assert share.times == pytest.approx(
            sum((length_of(row[0]) >= least) == is_long for row in found) / share.num_rows
        )
    assert rows.shares[0].source == f"long ({num_long} documents of {least} tokens or more)"
    assert rows.shares[1].source.startswith(f"short ({17 - num_long} documents, ")
    assert all(str(share) in rows.summary for share in rows.shares)


def length_of(part: str) -> int:
    return len(part.replace("<eos>", "e"))


def test_a_step_has_the_same_rows_of_a_mixture_on_any_number_of_processes(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, mixture="prolong")
    steps = []
    for replicas, batch_size, accumulation in ((1, 4, 1), (2, 1, 2), (4, 1, 1)):
        order = RowOrder(
            rows=rows,
            replicas=replicas,
            batch_size=batch_size,
            accumulation=accumulation,
            seed=0,
        )
        batches = [order.indices(step, n) for step in range(9) for n in range(replicas)]
        flat = [index for micro in batches for batch in micro for index in batch]
        steps.append([sorted(flat[n : n + 4]) for n in range(0, len(flat), 4)])
    assert steps[0] == steps[1] == steps[2]


def test_presets_are_those_of_their_papers() -> None:
    assert {name: each[:3] for name, each in PRESETS.items()} == {
        "prolong": (0.6, 0.4, 0),
        "olmo3": (0.34, 0.66, 8192),
    }
    assert read_mixture("short=0.66, long=0.34, from=8K")[:3] == PRESETS["olmo3"][:3]


@pytest.mark.parametrize(
    ("mixture", "more", "problem"),
    [
        ("prolongue", {}, r"'prolongue': Did you mean 'prolong'\? Give prolong, olmo3 or shares"),
        ("long=0.6", {}, "Give prolong, olmo3 or shares"),
        ("long=0.6,short=0.5", {}, "adds up to 1.1"),
        ("long=1,short=0", {}, "shares that add up to 1"),
        ("long=0.6,short=0.4,from=1x", {}, "'1x': write tokens as 131072, 128K"),
        ("long=0.6,short=half", {}, "could not convert.*half"),
        ("olmo3", {}, "long from 8,192 tokens, and a row holds 8.*smaller from="),
        ("prolong", {"data_shares": [1.0, 1.0]}, "both mixture and data_shares"),
        ("prolong", {"one_document_per_row": True}, "both mixture and one_document_per_row"),
        ("prolong", {"letters": "b"}, "long from 8 tokens, and the longest of 9 documents has 6"),
        ("long=0.6,short=0.4,from=2", {}, "all 13 documents have as many. Give shorter"),
    ],
)
def test_mixtures_that_cant_be_right(
    tmp_path: Path, mixture: str, more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        rows_of(tmp_path, **{"letters": "ab", **more}, mixture=mixture)
