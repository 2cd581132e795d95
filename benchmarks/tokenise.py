"""Time how text becomes a table of tokens, beside `datasets.map` with as many processes.

    python benchmarks/tokenise.py --text part*.jsonl --tokenizer Qwen/Qwen3-8B --processes 2

Each file (JSONL with a field `text`) is tokenised by both, one after the other, each in a process
of its own with an empty cache. CPU seconds are those of all processes: they tell the two apart also
where others use the machine.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median


def ours(file: str, tokenizer: str, processes: int) -> int:
    """The table of `recipes.finetune`: its tokens."""
    from transformers import AutoTokenizer

    from longctx_patch.recipes.data.text_reading import TextReading
    from longctx_patch.recipes.data.token_stream import TokenStream
    from longctx_patch.recipes.data.token_table import table_of

    reading = TextReading(AutoTokenizer.from_pretrained(tokenizer))
    return len(TokenStream([table_of(file, reading, num_proc=processes)]))


def mapped(file: str, tokenizer: str, processes: int) -> int:
    """What a few lines of `datasets` give: its tokens."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    from longctx_patch.recipes.data.token_table import lengths_of

    words = AutoTokenizer.from_pretrained(tokenizer)
    texts = load_dataset("json", data_files=file, split="train")
    table = texts.map(
        lambda rows: {"input_ids": words(rows["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        num_proc=processes,
        remove_columns=texts.column_names,
    )
    return int(lengths_of(table).sum())


WAYS: dict[str, Callable[[str, str, int], int]] = {"ours": ours, "map": mapped}


def timed(way: str, file: str, tokenizer: str, processes: int) -> dict[str, float]:
    """Seconds and tokens of one way, in this process."""
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        before, started = cpu_seconds(), time.perf_counter()
        tokens = WAYS[way](file, tokenizer, processes)
        return {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": cpu_seconds() - before,
            "tokens": tokens,
        }


def cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help="time this one in this process")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(timed(arguments.way, arguments.text[0], *_rest(arguments))))
        return
    ratios = []
    print("file                  ours MB/s  map MB/s  ratio  ratio by CPU seconds")
    for file in arguments.text:
        lines = Path(file).read_bytes().splitlines()
        size = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
        found = {way: _in_a_process(way, file, arguments) for way in WAYS}
        ratios.append(found["map"]["seconds"] / found["ours"]["seconds"])
        by_cpu = found["map"]["cpu_seconds"] / found["ours"]["cpu_seconds"]
        rates = [size / found[way]["seconds"] for way in WAYS]
        name = Path(file).name
        print(
            f"{name:20}  {rates[0]:9.2f}  {rates[1]:8.2f}  {ratios[-1]:5.2f}  {by_cpu:5.2f}",
            flush=True,
        )
    print(f"median ratio {median(ratios):.2f}")


def _rest(arguments: argparse.Namespace) -> tuple[str, int]:
    return arguments.tokenizer, arguments.processes


def _in_a_process(way: str, file: str, arguments: argparse.Namespace) -> dict[str, float]:
    words = [sys.executable, __file__, "--way", way, "--text", file]
    words += ["--tokenizer", arguments.tokenizer, "--processes", str(arguments.processes)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
