"""tokenise.py and resident.py at tiny sizes: both ways make the same tokens, and processes read the
tables that are written."""

import json
import queue
import threading
from pathlib import Path

import pytest
import resident
import tokenise

from longctx_patch.recipes.models import byte_tokenizer

TEXTS = ["one", "two and three", "x" * 50]


def test_both_ways_make_the_same_tokens(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "words")
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    found = {
        way: tokenise.timed(way, str(file), str(tmp_path / "words"), 1) for way in ("ours", "map")
    }
    number = sum(map(len, TEXTS))
    assert found["map"]["tokens"] == number
    assert found["ours"]["tokens"] == number + len(TEXTS)  # each ends with eos
    assert all(each["cpu_seconds"] > 0 for each in found.values())


@pytest.mark.parametrize("way", resident.WAYS)
def test_a_process_reads_the_table_that_is_written(tmp_path: Path, way: str) -> None:
    columns = dict(resident.TABLES[("sft",) if way == "sft" else ("joined", "packed")])
    resident.write_table(tmp_path / "table", columns, 0.01, 500)
    found: queue.Queue = queue.Queue()
    resident.read(way, tmp_path / "table", 3, 4096, threading.Barrier(1), found)
    before, after, _, records, rows, _ = found.get_nowait()
    assert after["anonymous"] >= before["anonymous"] > 0
    assert records > rows if way != "sft" else records == rows
