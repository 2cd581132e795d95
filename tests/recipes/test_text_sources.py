"""Rows of several sources of text: each once, or as often as their shares of the tokens ask."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.recipes.models import byte_tokenizer
from longctx_patch.recipes.settings import Settings
from longctx_patch.recipes.text_rows import TextRows
from longctx_patch.recipes.text_sources import rows_of_run

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
        lines = (json.dumps({"text": letter * n}) for n in DOCUMENTS[letter])
        sources.append(folder / f"{letter}.jsonl")
        sources[-1].write_text("\n".join(lines))
    given: dict[str, Any] = {"model": "m", "seq_len": SEQ_LEN, "output": str(folder / "out")}
    settings = Settings(**given, text=list(map(str, sources)), **CUTS[how], **more)
    return rows_of_run(settings, byte_tokenizer())


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
