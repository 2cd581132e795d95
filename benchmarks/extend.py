"""Extend a real model's context and evaluate it, by the commands that a user has.

    python benchmarks/extend.py --model SMOLLM2 --out results --gpus 4 --runs theta_128k \\
        --other news.jsonl

Each run is `longctx patch`, `longctx train` and `longctx eval` in processes of their own; the
published model is evaluated beside it, and so is the untrained one of the same RoPE. Long documents
are the Python sources and the docstrings of each package that is installed here, joined; those of
`HELD_OUT` are kept for evaluation. Short ones are the packages' descriptions, the docstrings of a
file, and those of --short. With --recalls, statements in long documents are made again further on
(artificial needles, arXiv 2406.19292). No task has their wordings, but passkey's question has the
form of the fourth one. --other names texts of another kind than those trained on: the loss at 0 to
8K tokens has to stay. Needles are hidden in what is kept, or in the prose of --haystack (RULER
hides them in essays).
Writes extension.jsonl, extension.md, and each evaluation's scores.json and scores.png. Started
again, it leaves out the commands that have ended well; other texts need another --out.
"""

import argparse
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from launch import Budget
from report import append_line

HELD_OUT = ("jax", "jaxlib", "scipy", "botorch", "gpytorch", "networkx")
"""Packages that no run is trained on."""
LEAST_LONG = 100_000
MOST_LONG = 3_000_000
MOST_HELD = 600_000
"""Characters of a joined document, about 30, 900 and 180 thousand tokens."""
MOST_TRAINED = 40_000_000
"""Characters of long documents of each kind: together what the longest run reads."""
RECALL_EVERY = 1_200
"""Characters between statements that are made again, about 350 tokens."""
SPACE = re.compile(r"\s")
RECALL_TOKENS = 60
"""What a statement that is made twice adds to a document."""
WORDINGS = (
    (
        "Note: the {thing} has the number {code}. Keep it in mind.",
        "As noted, the {thing} has the number {code}.",
    ),
    (
        "The number of the {thing} is {code}, as its owner said.",
        "Again, the number of the {thing} is {code}.",
    ),
    ("{code} belongs to the {thing}.", "Which number belongs to the {thing}? It is {code}."),
    ("The {thing} is {code}, whatever follows.", "As before, the {thing} is {code}."),
    (
        "The code of the {thing} is {code}; {code} is what it answers to.",
        "What is the code of the {thing}? The code of the {thing} is {code}.",
    ),
    (
        "The value that was chosen for {thing}: {code}.",
        "What is the value that was chosen for {thing} in the text above? "
        "The value that was chosen for {thing} in the text above is {code}.",
    ),
    (
        "For {thing}, somebody wrote down {code}.",
        "What did somebody write down for {thing}, as this text tells? "
        "What somebody wrote down for {thing}, as this text tells, is {code}.",
    ),
    (
        "{thing}: {code} is kept under this name.",
        "The number that is kept under the name {thing} in all of this is {code}.",
    ),
    (
        "Whoever asks for {thing} gets {code}.",
        "Whoever has read this knows what one gets who asks for {thing} here: it is {code}.",
    ),
)
"""A statement, and how it is made again: in four of them, words stand between thing and number."""
PIECE = 1.12
"""Rows in a document with statements: a little more than one, so that it fills the row."""
OTHER_LENGTH = 8192
DEPTHS = "0,5,25,50,75,95,100"


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a model is extended, and how far it is evaluated."""

    context: str
    stages: str
    options: tuple[str, ...]
    learning_rate: float = 4e-4

    def lengths(self) -> str:
        """What is evaluated: powers of two from 4K on."""
        return ",".join(f"{2**n}K" for n in range(2, int(self.context[:-1]).bit_length()))


RUNS = {
    "theta_64k": Run(context="64K", stages="16K:16,64K:120", options=("--rope", "theta", "--full")),
    "yarn_64k": Run(context="64K", stages="16K:16,64K:120", options=("--rope", "yarn", "--full")),
    "longlora_64k": Run(
        context="64K",
        stages="16K:16,64K:120",
        options=("--rope", "theta", "--lora", "--also-train", "embeddings,norms"),
        learning_rate=5e-4,
    ),
    "theta_128k": Run(
        context="128K", stages="32K:8,128K:160", options=("--rope", "theta", "--full")
    ),
    "yarn_128k": Run(context="128K", stages="32K:8,128K:160", options=("--rope", "yarn", "--full")),
    "longlora_128k": Run(
        context="128K",
        stages="32K:8,128K:160",
        options=("--rope", "theta", "--lora", "--also-train", "embeddings,norms"),
        learning_rate=5e-4,
    ),
}


def sources(names: Iterable[str], root: Path) -> Iterator[tuple[str, str]]:
    """Each Python file, beside its package."""
    for name in names:
        for file in sorted((root / name).rglob("*.py"), key=lambda file: (file.parent, file)):
            text = file.read_text("utf-8", errors="ignore")
            if 200 < len(text) < 400_000:
                yield name, f"# {file.relative_to(root)}\n{text}\n"


def docstrings(names: Iterable[str], root: Path) -> Iterator[tuple[str, str]]:
    """What the longer docstrings of each Python file say, beside its package."""
    for name, text in sources(names, root):
        found = re.findall(r'"""(.*?)"""', text, re.DOTALL)
        if said := "\n\n".join(cleandoc(each) for each in found if len(each) > 300):
            yield name, said


def running(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The texts without their line breaks, as RULER joins its essays."""
    return ((name, " ".join(text.split()) + " ") for name, text in texts)


def joined(texts: Iterable[tuple[str, str]], most: int = MOST_LONG) -> Iterator[str]:
    """The texts of each package as documents of so many characters."""
    for _, files in groupby(texts, itemgetter(0)):
        whole = "".join(text for _, text in files)
        pieces = (whole[start : start + most] for start in range(0, len(whole), most))
        yield from (piece for piece in pieces if len(piece) >= LEAST_LONG)


def descriptions(root: Path) -> Iterator[str]:
    """What packages say of themselves."""
    for file in sorted(root.glob("*.dist-info/METADATA")):
        _, _, text = file.read_text("utf-8", errors="ignore").partition("\n\n")
        if len(text) > 1500:
            yield text


def pieces(documents: list[str], row_tokens: int, tokenizer: Any) -> Iterator[tuple[str, int]]:
    """Documents of about `PIECE` rows, each with the characters of a row, which windows of its
    document tell."""
    window, number = 2000, 48
    for text in documents:
        windows = [text[n * len(text) // number :][:window] for n in range(number)]
        tokens = sum(map(len, tokenizer(windows, add_special_tokens=False)["input_ids"]))
        chars = sum(map(len, windows))
        row = int(row_tokens * chars / (tokens + chars / RECALL_EVERY * RECALL_TOKENS))
        size = int(PIECE * row)
        yield from ((text[start : start + size], row) for start in range(0, len(text), size))


def with_recalls(text: str, draw: random.Random, row_chars: int) -> str:
    """A document in which statements are made twice, so that the second one is predicted by who has
    read the first: two of three at the end of the row, whose distances are all that the row has,
    the others at distances of which short ones are as frequent as long ones. A quarter of the
    former begins the row: what lies there is read the worst. Tables of numbers stay as they are."""
    words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", text[:200_000])))
    if len(words) < 100:
        return text
    span = min(row_chars, len(text))
    added: list[tuple[int, str]] = []
    for number in range(len(text) // RECALL_EVERY):
        thing = draw.choice(words) + draw.choice(" -") + draw.choice(words)
        code = "".join(draw.choices("0123456789", k=draw.randint(4, 8)))
        if number % 3:
            begins = number % 4 == 1
            place = int(draw.uniform(0, 0.01 if begins else 1) * span)
            again = int(draw.uniform(0.3 if begins and number % 8 == 1 else 0.93, 1.02) * span)
            again = max(again, place + draw.randrange(20, 500))
        else:
            place = draw.randrange(len(text))
            again = place + int(math.exp(draw.uniform(math.log(20), math.log(row_chars))))
        around = draw.choice((" {}", "\n{}\n"))
        said = (each.format(thing=thing, code=code) for each in draw.choice(WORDINGS))
        for at, line in zip((place, again), said, strict=True):
            word = SPACE.search(text, at)
            added.append((word.start() if word else len(text), around.format(line)))
    parts, end = [], 0
    for place, line in sorted(added, key=itemgetter(0)):
        parts += [text[end:place], line]
        end = place
    return "".join([*parts, text[end:]])


def up_to(most: int, texts: list[str], draw: random.Random) -> list[str]:
    """As many of the texts as have so many characters together, in random order."""
    draw.shuffle(texts)
    ends = accumulate(map(len, texts))
    return [text for text, end in zip(texts, ends, strict=True) if end <= most]


def write_texts(folder: Path, *, recalls: bool, row_tokens: int, tokenizer: Any) -> None:
    """long.jsonl, short.jsonl and held.jsonl."""
    root, draw = Path(sysconfig.get_paths()["purelib"]), random.Random(0)
    packages = sorted(path.name for path in root.iterdir() if (path / "__init__.py").is_file())
    trained = [name for name in packages if name not in HELD_OUT]
    code, said = sources(trained, root), list(docstrings(trained, root))
    kinds = (list(joined(texts)) for texts in (code, running(said)))
    long = [text for texts in kinds for text in up_to(MOST_TRAINED, texts, draw)]
    short = [text for _, text in said if 1500 < len(text) < LEAST_LONG]
    short = [*descriptions(root), *up_to(MOST_TRAINED, short, draw)]
    if recalls:
        parts = pieces(long, row_tokens, tokenizer)
        long = [with_recalls(text, draw, row) for text, row in parts if len(text) > RECALL_EVERY]
    draw.shuffle(long)
    held = joined(sources((name for name in HELD_OUT if name in packages), root), MOST_HELD)
    for name, texts in (("long", long), ("short", short), ("held", held)):
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(lines)} documents, {sum(map(len, lines)) / 1e6:.1f} MB", flush=True)


def write_other(folder: Path, file: Path, tokenizer: Any) -> None:
    """Texts of another kind, joined to documents of 8K tokens: other.jsonl."""
    texts = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    # A few tokens more, since what is decoded may have fewer when it is read again.
    size = OTHER_LENGTH + 64
    rows = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    lines = [json.dumps({"text": tokenizer.decode(row)}) + "\n" for row in rows]
    (folder / "other.jsonl").write_text("".join(lines), encoding="utf-8")


class Commands:
    """Runs `longctx` with a limit, and notes what was run, how it ended and how long it took."""

    def __init__(self, folder: Path, budget: Budget, where: tuple[str, ...]) -> None:
        self.folder, self.where = folder, where
        self._budget = budget
        log = folder / "extension.jsonl"
        rows = map(json.loads, log.read_text().splitlines() if log.exists() else ())
        self._done = {row["command"] for row in rows if row["code"] == 0}

    def __call__(self, name: str, *arguments: str) -> bool:
        """Whether it ended well within what is left of the time, now or before."""
        command = ["longctx", *arguments]
        if shlex.join(command) in self._done:
            return True
        print(f"$ {shlex.join(command)}", flush=True)
        started, log = time.perf_counter(), self.folder / f"{name}.log"
        with log.open("w") as out:
            job = subprocess.Popen(
                [sys.executable, "-m", "longctx_patch.cli.main", *arguments],
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                done = job.wait(max(1.0, self._budget.limit_s(86_400)))
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                done = -1
        seconds = round(time.perf_counter() - started, 1)
        row = {"name": name, "command": shlex.join(command), "seconds": seconds, "code": done}
        append_line(row, self.folder / "extension.jsonl")
        print(f"{name}: {seconds} s, exit code {done}", flush=True)
        if done:
            print("\n".join(log.read_text().splitlines()[-15:]), flush=True)
        return done == 0


def extend(run: Commands, name: str, recipe: Run, arguments: argparse.Namespace) -> None:
    """Patch, train and evaluate."""
    lengths = arguments.lengths or recipe.lengths()
    ended = run(
        f"{name}.patch",
        *("patch", arguments.model, "--context", recipe.context, *recipe.options),
        *("--stages", recipe.stages, "--gpus", str(arguments.gpus)),
        *("--data", "long.jsonl", "--data", "short.jsonl", "--mixture", arguments.mixture),
        *(word for file in arguments.short for word in ("--data", str(file.absolute()))),
        *("--out", name, *run.where),
    )
    rate = f"--learning-rate={recipe.learning_rate}"
    ended = ended and run(f"{name}.train", "train", name, rate, "--warmup-steps=10")
    tasks = [f"--tasks={arguments.tasks}", f"--lengths={lengths}", f"--depths={arguments.depths}"]
    tasks += ["--text=held.jsonl", *run.where]
    tasks += [f"--haystack={file.absolute()}" for file in arguments.haystack]
    trained = ("eval", name, *(["--alone"] if arguments.alone else []))
    samples = f"--samples={arguments.samples}"
    if not (ended and run(f"{name}.eval", *trained, *tasks, samples, "--out", f"{name}_eval")):
        return
    if arguments.other:
        other = ("--tasks=", "--lengths=8K", "--text=other.jsonl")
        run(f"{name}.other", *trained, *other, "--out", f"{name}_other", *run.where)
    if arguments.alone:
        return
    rope = ("--context", recipe.context, *recipe.options[:2])
    untrained = ("eval", arguments.model, *rope, *tasks, "--samples=1")
    run(f"{name}.untrained", *untrained, "--out", f"{name}_untrained")


def write_report(folder: Path) -> None:
    """extension.md: the tables of all evaluations, and the commands with their times."""
    from longctx_patch.evaluation.scores import ContextScores, compare_scores

    parts = ["# Extending a context\n"]
    for file in sorted(folder.glob("*/scores.json")):
        models = json.loads(file.read_text("utf-8"))["models"]
        scores = [ContextScores.from_json(each["scores"]) for each in models]
        parts.append(f"## {file.parent.name}\n\n```\n{compare_scores(scores)}\n```\n")
    lines = [json.loads(line) for line in (folder / "extension.jsonl").read_text().splitlines()]
    rows = [f"| `{row['command']}` | {row['seconds']} | {row['code']} |" for row in lines]
    parts.append("\n".join(["| command | s | exit code |", "|---|--:|--:|", *rows, ""]))
    (folder / "extension.md").write_text("\n".join(parts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder of the model with its tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["theta_128k"])
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--cpu", action="store_true", help="processes on the CPU")
    parser.add_argument("--other", type=Path, help="JSONL of texts of another kind")
    parser.add_argument("--short", type=Path, nargs="*", default=[], help="more short texts, JSONL")
    parser.add_argument("--haystack", type=Path, nargs="*", default=[], help="prose, JSONL")
    parser.add_argument("--recalls", action="store_true")
    alone = "not beside the published and the untrained model, which another run has"
    parser.add_argument("--alone", action="store_true", help=alone)
    parser.add_argument("--mixture", default="prolong")
    parser.add_argument("--tasks", default="passkey,niah_single_1,niah_single_2")
    parser.add_argument("--depths", default=DEPTHS)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--lengths", default="", help="of the evaluation [4K to the context]")
    parser.add_argument("--budget-s", type=float, default=3600.0)
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    folder = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    run = Commands(folder, Budget(arguments.budget_s), where=("--cpu",) if arguments.cpu else ())
    most = max(int(RUNS[name].context[:-1]) for name in arguments.runs) * 1024
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if not (folder / "extension.jsonl").exists():
        write_texts(folder, recalls=arguments.recalls, row_tokens=most, tokenizer=tokenizer)
        if arguments.other:
            write_other(folder, arguments.other, tokenizer)
    for name in arguments.runs:
        extend(run, name, RUNS[name], arguments)
        write_report(folder)


if __name__ == "__main__":
    main()
