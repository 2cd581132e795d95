"""Count what processes hold in memory that read rows of one large table, beside their imports.

    python benchmarks/resident.py --folder /tmp/table --gigabytes 10 --processes 8 --rows 300

Writes two tables of random tokens into FOLDER, as the recipes do, one after the other, and removes
them: one with labels (`recipes.sft`), and one of documents (`recipes.finetune`), whose rows are
joined or packed. All processes read their rows, then wait for each other; memory is that of
/proc/PID/smaps_rollup: anonymous memory is a process's own, file pages are the page cache's.
"""

import argparse
import multiprocessing
import re
import shutil
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

WAYS = ("sft", "joined", "packed")
TABLES: dict[tuple[str, ...], dict[str, str]] = {
    ("sft",): {"input_ids": "tokens", "labels": "tokens"},
    ("joined", "packed"): {"input_ids": "tokens", "ends": "bool", "digest": "int64"},
}
"""Columns, as those of `Reading` and `TextReading`, by the ways that read them."""
FILE_BYTES = 500 * 10**6
"""As `datasets` cuts tables."""


def write_table(folder: Path, columns: dict[str, str], gigabytes: float, length: int) -> None:
    """Files of rows with log-normal lengths, about `length` on the average."""
    import pyarrow as pa  # type: ignore[import-untyped]

    from longctx_patch.recipes.data.token_table import chunks_of

    folder.mkdir(parents=True)
    random, written, number = np.random.default_rng(0), 0, 0
    while written < gigabytes * 1e9:
        rows = random_rows(random, columns, length)
        chunks = chunks_of(rows, columns)
        first = next(chunks)
        with pa.ipc.new_stream(folder / f"{number:05}.arrow", first.schema) as file:
            size = 0
            for chunk in chain([first], _endless(chunks)):
                file.write_table(chunk)
                size += chunk.nbytes
                if size >= min(FILE_BYTES, gigabytes * 1e9):
                    break
        written, number = written + size, number + 1


def _endless(chunks: Iterator[Any]) -> Iterator[Any]:
    """Some chunks, over and over: making all would take long."""
    some = list(islice(chunks, 8))
    while True:
        yield from some


def random_rows(random: Any, columns: dict[str, str], length: int) -> Iterator[dict[str, Any]]:
    tokens = random.integers(0, 150_000, 2**22, dtype=np.int32)
    while True:
        size = int(np.clip(random.lognormal(np.log(length) - 0.5, 1), 2, 2**14))
        start = int(random.integers(len(tokens) - size))
        ids = tokens[start : start + size]
        fill = {"tokens": ids, "bool": True, "int64": int(random.integers(2**62))}
        yield {name: fill[kind] for name, kind in columns.items()}


def read(way: str, folder: Path, count: int, seq_len: int, barrier: Any, found: Any) -> None:
    """One process: its memory before and after it has read its rows."""
    import datasets
    import transformers  # noqa: F401

    from longctx_patch.recipes import finetune, text_rows
    from longctx_patch.recipes.data.token_stream import TokenStream

    del finetune
    before = memory()
    started = time.perf_counter()
    files = [datasets.Dataset.from_file(str(path)) for path in sorted(folder.glob("*.arrow"))]
    table = datasets.concatenate_datasets(files)
    rows: Any = table
    if way == "packed":
        rows = text_rows.packed_rows(TokenStream([table]), seq_len)
    elif way == "joined":
        rows = text_rows.joined_rows(TokenStream([table]), seq_len)
    opened = time.perf_counter() - started
    order = np.random.default_rng(multiprocessing.current_process().pid).permutation(len(rows))
    for place in order[:count].tolist():
        rows[place]
    after = memory()
    barrier.wait()
    found.put((before, after, memory(), len(table), len(rows), opened))
    barrier.wait()


def memory() -> dict[str, int]:
    """Bytes of this process."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return {
        "anonymous": found["Anonymous"],
        "file": found["Rss"] - found["Anonymous"],
        "file_share": found["Pss_File"],
    }


def measure(way: str, arguments: argparse.Namespace) -> str:
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(arguments.processes), context.Queue()
    job = (way, arguments.folder, arguments.rows, arguments.seq_len, barrier, found)
    processes = [context.Process(target=read, args=job) for _ in range(arguments.processes)]
    for process in processes:
        process.start()
    results = [found.get(timeout=900) for _ in processes]
    for process in processes:
        process.join()
    before, _, after, records, rows, opened = zip(*results, strict=True)
    total = partial(_total, after)
    added = total("anonymous") - _total(before, "anonymous")
    return (
        f"{way:7} {records[0]:>10,} {rows[0]:>10,} {_total(before, 'anonymous'):>9.2f} "
        f"{added:>6.2f} {total('file'):>9.2f} {total('file_share'):>9.2f} {max(opened):>7.1f}"
    )


def _total(results: Any, name: str) -> float:
    return float(sum(each[name] for each in results)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="is made and removed")
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rows", type=int, default=300, help="that each process reads")
    parser.add_argument("--length", type=int, default=1500, help="tokens of a record, about")
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    arguments = parser.parse_args()
    print("GB of all processes together")
    print("         records       rows   imports  added  file Rss  file Pss  open s")
    for ways, columns in TABLES.items():
        wanted = [way for way in ways if way in arguments.ways]
        if not wanted:
            continue
        try:
            write_table(arguments.folder, columns, arguments.gigabytes, arguments.length)
            for way in wanted:
                print(measure(way, arguments), flush=True)
        finally:
            shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
