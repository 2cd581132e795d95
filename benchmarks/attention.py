"""The attention operator over the GPUs of one machine, ours and others', as a share of the ideal.

    python benchmarks/attention.py --out results/                          # everything, 4 GPUs
    python benchmarks/attention.py --out results/ --tokens 131072 --masks packed --peers ideal ours
    python benchmarks/attention.py --out results/ --configs ulysses=4 ring=4,plan=zigzag

The ideal of a problem is one causal kernel over all its tokens with a rank's part of the heads, on
all GPUs at once; for documents and windows, over a causal row of the same area. Each peer is a
launch of its own with its own time limit. Every candidate's output and gradients are first compared
with dense attention in float64 on a small problem; one that is wrong is reported and not timed.
Writes attention.jsonl, attention.md and attention.png into --out; benchmarks/README.md says more.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import get_args

import torch
from config_text import config_of
from launch import Budget, end_with_children, run_job
from measure import Row, machine
from operators import FASTEST
from problems import Problem, lognormal_lengths, share_of
from report import Bars, Column, append_line, hardware, heading, plot, read_lines, table

from longctx_patch import Workload, explain
from longctx_patch.predict.machines import HardwareName

HERE = Path(__file__).parent
PEERS = ("ideal", "ours", "torch_cp", "ulysses", "alst", "ring_flash_attn_peer", "yunchang_peer")
HEADS = ("32/8", "32/32", "28/4")
TOKENS = (16384, 65536, 131072)


def make_problems(arguments: argparse.Namespace) -> list[Problem]:
    """Causal ones of all sizes; packed and with a window at the largest, with the first heads."""
    heads = [_heads(text) for text in arguments.heads]
    longest = max(arguments.tokens)
    shapes = list(product(heads, arguments.tokens)) if "causal" in arguments.masks else []
    problems = [_problem(tokens, *pair, arguments.head_dim) for pair, tokens in shapes]
    plain = _problem(longest, *heads[0], arguments.head_dim)
    if "packed" in arguments.masks:
        lengths = lognormal_lengths(longest, arguments.documents)
        problems.append(Problem(**asdict(plain) | {"lengths": lengths}))
    if "window" in arguments.masks:
        problems.append(Problem(**asdict(plain) | {"window": arguments.window}))
    return problems


def _heads(text: str) -> tuple[int, int]:
    try:
        query, kv = (int(number) for number in text.split("/"))
    except ValueError:
        raise SystemExit(f"--heads {text}: write query/key-value heads, such as 32/8") from None
    return query, kv


def _problem(tokens: int, heads: int, kv_heads: int, head_dim: int) -> Problem:
    return Problem(num_tokens=tokens, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


def run_peer(
    peer: str,
    problems: Sequence[Problem],
    fastest: dict[int, str],
    arguments: argparse.Namespace,
    limit_s: float,
) -> list[Row]:
    """What the candidates of one peer gave, and a row for how the launch itself went wrong.

    `fastest`: the kernel of the fastest ideal so far, by the problem's number.
    """
    lines = arguments.out / f"{_file_name(peer)}.lines"
    lines.unlink(missing_ok=True)
    job = arguments.out / f"{_file_name(peer)}.job.json"
    settings = {
        "peer": peer,
        "problems": [asdict(problem) for problem in problems],
        "fastest": fastest,
        "lines": str(lines),
        **{
            name: getattr(arguments, name)
            for name in ("only", "configs", "kernels", "plans", "ideal_kernels")
        },
        "iterations": arguments.iterations,
        "check_tokens": arguments.check_tokens,
    }
    job.write_text(json.dumps(settings))
    logs = arguments.out / _file_name(peer)
    script = HERE / "attention_job.py"
    ending = run_job(script, [str(job)], arguments.gpus, limit_s, logs)
    rows = read_lines(lines)
    job.unlink(missing_ok=True)
    if ending.problem is not None:
        rows.append({"peer": peer, "candidate": "", "status": "failed", "reason": ending.problem})
    print(
        f"{peer}: {ending.seconds:.0f} s, {len(rows)} rows, {ending.problem or 'ended well'}",
        flush=True,
    )
    return rows


def _file_name(peer: str) -> str:
    return f"attention.{peer}"


def fastest_ideals(rows: Sequence[Row], problems: Sequence[Problem]) -> dict[int, str]:
    """The kernel of the fastest ideal of each problem, by the problem's number."""
    found: dict[int, str] = {}
    for number in range(len(problems)):
        ideals = [r for r in rows if r["peer"] == "ideal" and r["status"] == "ok"]
        mine = [row for row in ideals if row["problem"] == number]
        if mine:
            found[number] = min(mine, key=lambda row: row["seconds"])["candidate"]
    return found


def with_ideals(rows: Sequence[Row], problems: Sequence[Problem], num_ranks: int) -> list[Row]:
    """Rows with their problem spelt out and, where timed, their share of the ideal."""
    ideals: dict[tuple[int, str], float] = {}
    for row in rows:
        if row["peer"] == "ideal" and row["status"] == "ok":
            number = row["problem"]
            seconds = row["seconds"] * share_of(problems[number], num_ranks)
            ideals[number, row["candidate"]] = seconds
            fastest = ideals.get((number, FASTEST), seconds)
            ideals[number, FASTEST] = min(fastest, seconds)
    return [_with_ideal(row, problems, ideals, num_ranks) for row in rows]


def _with_ideal(
    row: Row, problems: Sequence[Problem], ideals: dict[tuple[int, str], float], num_ranks: int
) -> Row:
    if "problem" not in row:
        return row
    number = row["problem"]
    problem = problems[number]
    spelt = asdict(problem) | {"mask": problem.mask, "area": problem.area, "num_ranks": num_ranks}
    row = row | {"problem": str(problem), **spelt}
    if row["status"] != "ok":
        return row
    seconds, ideal = row["seconds"], ideals.get((number, row["kernel"]))
    if row["peer"] == "ideal" and ideal is not None:
        seconds = ideal
    row["tflops_per_s_per_gpu"] = problem.flops / num_ranks / seconds * 1e-12
    fastest = ideals.get((number, FASTEST))
    if "ideal_beside_s" in row:  # measured by turns with the candidate, where clocks were its own
        beside = row["ideal_beside_s"] * share_of(problem, num_ranks)
        fastest = fastest * beside / ideal if fastest and ideal else fastest
        ideal = beside
    for name, best in (("ideal", ideal), ("fastest_ideal", fastest)):
        row[f"{name}_s"] = best
        row[f"share_of_{name}"] = None if best is None else best / seconds
    return row


def with_predictions(rows: Sequence[Row], problems: Sequence[Problem], where: Row) -> list[Row]:
    """Rows of ours with the seconds that the cost model gives them, where it knows the machine."""
    known = [name for name in get_args(HardwareName) if name in where["device"].lower()]
    by_name = {str(problem): problem for problem in problems}
    return [
        row | {"predicted_s": predicted_seconds(row, by_name[row["problem"]], known[0])}
        if known and row["peer"] == "ours" and row["status"] == "ok"
        else row
        for row in rows
    ]


def predicted_seconds(row: Row, problem: Problem, hardware: HardwareName) -> float:
    """Forward and backward of one of ours by the cost model."""
    config = replace(config_of(row["candidate"]), hardware=hardware)
    workload = Workload(
        num_tokens=problem.num_tokens,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        lengths=problem.lengths or (),
        window=problem.window,
    )
    chosen = [found.prediction for found in explain(config, workload).rows if found.chosen]
    return sum(prediction.makespan_s for prediction in chosen)


def speedup_of_window(rows: Sequence[Row], problems: Sequence[Problem]) -> str:
    """The best of ours with a window against the best of ours on the causal row of that size."""
    ours = [row for row in rows if row["peer"] == "ours" and row["status"] == "ok"]
    for windowed in (problem for problem in problems if problem.mask == "window"):
        causal = replace(windowed, window=None)
        fast, slow = (
            min((row["seconds"] for row in ours if row["problem"] == str(problem)), default=None)
            for problem in (windowed, causal)
        )
        if fast and slow:
            return f"Ours with the window: {slow / fast:.1f} times as fast as causal.\n\n"
    return ""


def _milliseconds(name: str) -> Column:
    title = f"{name.removesuffix('_s')} ms".removeprefix("seconds ")
    return Column(title, lambda row: _of(row, name, lambda value: f"{value * 1e3:.3f}"))


def _of(row: Row, name: str, text: Callable[[float], str]) -> str | None:
    value = row.get(name)
    return None if value is None else text(value)


def _spread(row: Row) -> str | None:
    if row["status"] != "ok":
        return None
    return f"{row['p20_s'] * 1e3:.3f}-{row['p80_s'] * 1e3:.3f}"


COLUMNS = (
    Column("peer", lambda row: row["peer"]),
    Column("candidate", lambda row: row["candidate"]),
    _milliseconds("seconds"),
    Column("p20-p80 ms", _spread),
    _milliseconds("forward_s"),
    _milliseconds("predicted_s"),
    Column("kernel", lambda row: row.get("kernel")),
    _milliseconds("ideal_s"),
    Column("share of ideal", lambda row: _of(row, "share_of_ideal", "{:.1%}".format)),
    Column(
        "share of fastest ideal", lambda row: _of(row, "share_of_fastest_ideal", "{:.1%}".format)
    ),
    Column("error / kernel's", lambda row: _of(row, "error_over_plain", "{:.2f}".format)),
    Column("TFLOP/s/GPU", lambda row: _of(row, "tflops_per_s_per_gpu", "{:.0f}".format)),
    Column("note", lambda row: row["status"] if row["status"] != "ok" else None),
    Column("reason", lambda row: row.get("reason")),
)


def by_speed(rows: Sequence[Row]) -> list[Row]:
    """The fastest first, then what was not timed."""
    return sorted(rows, key=lambda row: (row["status"] != "ok", row.get("seconds", 0.0)))


def write_report(
    rows: Sequence[Row], problems: Sequence[Problem], num_ranks: int, out: Path, where: Row
) -> None:
    (out / "attention.jsonl").unlink(missing_ok=True)
    for row in rows:
        append_line({**row, "machine": where}, out / "attention.jsonl")
    title = f"The attention operator, forward and backward: {hardware(where, num_ranks)}"
    text = heading(title, where)
    text += (
        "Median of the slowest rank. The ideal is one causal kernel over all tokens with a rank's "
        "part of the heads, on all GPUs at once; of documents and windows, over a causal row of "
        "the same area, scaled. Each candidate's own kernel's ideal is timed by turns with it.\n\n"
    )
    text += speedup_of_window(rows, problems)
    panels = []
    for problem in problems:
        mine = by_speed([row for row in rows if row.get("problem") == str(problem)])
        run = [row for row in mine if row["status"] != "not covered"]
        text += f"## {problem}\n\n{table(COLUMNS, run)}\n{_not_covered(mine)}"
        shares = {
            f"{row['peer']}: {row['candidate']}": 100 * row["share_of_fastest_ideal"]
            for row in mine
            if row.get("share_of_fastest_ideal")
        }
        panels.append(Bars(str(problem), "% of the fastest kernel's ideal", shares))
    launches = [row for row in rows if "problem" not in row]
    if launches:
        text += f"## Launches that failed\n\n{table(COLUMNS, launches)}\n"
    (out / "attention.md").write_text(text)
    plot(panels, out / "attention.png", title)


def _not_covered(rows: Sequence[Row]) -> str:
    """A line for each reason, with how many candidates have it."""
    counts = Counter(
        f"{row['peer']}: {row['reason']}" for row in rows if row["status"] == "not covered"
    )
    lines = [f"- not covered: {reason} ({count})\n" for reason, count in counts.items()]
    return "".join([*lines, "\n"]) if lines else ""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--gpus", type=int, default=4, help="processes of a launch (4); without GPUs on the CPU")
    add(
        "--tokens", type=int, nargs="+", default=TOKENS, help="of the sequence (16384 65536 131072)"
    )
    add("--heads", nargs="+", default=HEADS, help="query/key-value heads, such as 32/8")
    add("--head-dim", type=int, default=128)
    masks = ["causal", "packed", "window"]
    add("--masks", nargs="+", default=masks, choices=masks, help="default: all")
    add("--documents", type=int, default=64, help="log-normal ones in the packed row")
    add("--window", type=int, default=4096)
    add("--peers", nargs="+", default=PEERS, help="ideal gives the shares; also module.names")
    add("--only", nargs="+", help="patterns of 'peer: candidate', such as 'ours: ulysses=*'")
    add("--configs", nargs="+", help="ours, in place of the grid: ulysses=2,ring=2,plan=zigzag")
    add("--plans", nargs="+", help="ours: plans of the grid")
    add("--kernels", nargs="+", help="ours: kernels of the grid (default auto)")
    add("--ideal-kernels", nargs="+", help="default: all fast ones")
    add("--iterations", type=int, default=10, help="timed calls (default 10)")
    add("--check-tokens", type=int, default=4096, help="of the problem compared (default 4096)")
    add("--limit-s", type=float, default=300.0, help="of each launch (default 300)")
    add("--budget-s", type=float, default=math.inf, help="of all launches (default none)")
    parsed = parser.parse_args(arguments)
    for text in parsed.configs or ():
        try:
            config_of(text)
        except ValueError as error:
            parser.error(str(error))
    return parsed


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    arguments.out.mkdir(parents=True, exist_ok=True)
    problems = make_problems(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = Budget(arguments.budget_s)
    rows: list[Row] = []
    for peer in arguments.peers:
        fastest = fastest_ideals(rows, problems)
        rows += run_peer(peer, problems, fastest, arguments, budget.limit_s(arguments.limit_s))
        # After each, so that an interruption leaves the peers that were done before it.
        where = machine(device)
        complete = with_ideals(rows, problems, arguments.gpus)
        complete = with_predictions(complete, problems, where)
        write_report(complete, problems, arguments.gpus, arguments.out, where)
        (arguments.out / f"{_file_name(peer)}.lines").unlink(missing_ok=True)
    print((arguments.out / "attention.md").read_text(), file=sys.stdout)


if __name__ == "__main__":
    end_with_children()
    main()
