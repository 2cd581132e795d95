"""Tables hold the rows of their sources, are made once, and notice what has changed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longctx_patch.recipes.data import sources
from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.reading import Reading
from longctx_patch.recipes.data.records import BadRecord, NoRecords
from longctx_patch.recipes.data.token_table import lengths_of, losses_of, mixed, stream_of, table_of
from tests.recipes.conftest import write_records
from tests.trl.cases import rows, tokenizer


def write(path: Path, records: list[dict[str, Any]]) -> str:
    return str(write_records(path, records))


def reading(kind: Any = "text", seq_len: int = 100, **more: Any) -> Reading:
    return Reading(tokenizer(), kind, seq_len, **more)


def test_rows_come_in_order_from_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", rows("text", 200, 1))
    one = table_of(source, reading())
    monkeypatch.setattr(sources, "PART_BYTES", 1000)
    several = table_of(source, reading(), num_proc=3)
    assert several._fingerprint != one._fingerprint
    assert several[:] == one[:]
    assert list(stream_of(source, reading(), Losses())) == one.to_list()
    wanted = [len(text["text"].split()) + 1 for text in rows("text", 200, 1)]
    assert lengths_of(one).tolist() == wanted
    assert lengths_of(one.select([3, 1])).tolist() == [wanted[3], wanted[1]]


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", rows("completion", 20, 1))
    table = table_of(source, reading("completion"))

    def fail(*_: object) -> None:
        raise AssertionError("records were read again")

    with monkeypatch.context() as patched:
        patched.setattr("longctx_patch.recipes.data.token_table.records_of", fail)
        assert table_of(source, reading("completion"))[:] == table[:]
        for other in (
            reading("completion", 99),
            reading("completion", completion_only=False),
            reading("completion", too_long="cut"),
        ):
            with pytest.raises(ValueError, match="records were read again"):
                table_of(source, other)
    write(tmp_path / "a.jsonl", rows("completion", 21, 1))
    assert len(table_of(source, reading("completion"))) == 21


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_bad_record_is_named(
    tmp_path: Path, num_proc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 500)
    source = write(tmp_path / "a.jsonl", [*rows("text", 50, 1), {"other": "x"}])
    with pytest.raises(BadRecord, match=r"a.jsonl, line 51: no text in field 'text'"):
        table_of(source, reading(), num_proc=num_proc)


def test_a_source_without_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data in"):
        table_of(write(tmp_path / "a.jsonl", []), reading())


@pytest.mark.parametrize("num_proc", [1, 2])
def test_what_is_left_out_is_kept_beside_the_table(
    tmp_path: Path, num_proc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of tables that are joined; and by name where nothing else is there."""
    monkeypatch.setattr(sources, "PART_BYTES", 500)
    texts = [{"text": "" if number % 9 == 4 else "w1 w2"} for number in range(50)]
    source = write(tmp_path / "a.jsonl", texts)
    for _ in range(2):  # made, and found made
        table = table_of(source, reading(), num_proc=num_proc)
        joined = mixed(
            [table, table_of(write(tmp_path / "b.jsonl", texts[:4]), reading())], [1, 1], seed=0
        )
        (left_out,) = losses_of(table).facts()
        assert left_out[:2] == ("left out", "6")
        assert re.match(
            r"of 50 records: they are empty; first: .*line 5; .*line 14; .*line 23", left_out[2]
        )
        assert losses_of(joined).num_records == 54
    with pytest.raises(NoRecords, match=r"all its 1 records are left out: they.*a.jsonl, line 1"):
        table_of(write(tmp_path / "a.jsonl", [{"text": ""}]), reading())


def test_a_table_that_was_changed_is_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens and labels that are others, a file that was cut or removed, damage to what is said of
    it: none of them stops a run, or reaches it."""
    source = write(tmp_path / "a.jsonl", rows("text", 200, 1))
    wanted = table_of(source, reading()).to_dict()
    (file,) = {Path(found["filename"]) for found in table_of(source, reading()).cache_files}
    info, whole = file.parent / "dataset_info.json", file.read_bytes()
    assert capsys.readouterr().out == ""
    place = whole.index(np.array(wanted["input_ids"][150], np.int32).tobytes())
    changes: dict[str, Callable[[], object]] = {
        "holds other bytes": lambda: file.write_bytes(whole[:place] + b"\1" + whole[place + 1 :]),
        "bytes and had": lambda: file.write_bytes(whole[:-3000]),
        "is missing": file.unlink,
        "dataset_info.json holds other": lambda: info.write_text(
            info.read_text()[:-100] + " " * 100
        ),
        "sealed.json is damaged": lambda: (file.parent / "sealed.json").write_text("{"),
    }
    for said, change in changes.items():
        change()
        assert table_of(source, reading()).to_dict() == wanted
        out = capsys.readouterr().out
        assert f"{source}: the cached table was changed ({file.parent}/" in out
        assert said in out
        assert out.count("it is made anew") == 1


def test_shares_are_those_of_tokens(tmp_path: Path) -> None:
    """Long and short records: each source has its share of the tokens that are drawn."""
    long = [{"input_ids": [1] * 90, "labels": [1] * 90} for _ in range(50)]
    short = [{"input_ids": [2] * 6, "labels": [2] * 6} for _ in range(2000)]
    tables = [
        table_of(write(tmp_path / name, records), reading("tokens"))
        for name, records in (("a.jsonl", long), ("b.jsonl", short))
    ]
    found = mixed(tables, [3, 1], seed=5)
    lengths = lengths_of(found)
    share = lengths[lengths == 90].sum() / lengths.sum()
    assert abs(share - 0.75) < 0.02
    assert (lengths == 6).sum() >= 2000, "each row is there at least once"
    assert np.array_equal(lengths, lengths_of(mixed(tables, [3, 1], seed=5)))
    assert not np.array_equal(lengths, lengths_of(mixed(tables, [3, 1], seed=6)))
