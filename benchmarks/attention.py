"""Time attention operators over the GPUs of one machine, ours and others', against the ideal.

    python benchmarks/attention.py --out results/                          # everything, 4 GPUs
    python benchmarks/attention.py --out results/ --tokens 131072 --masks packed --peers ideal ours
    python benchmarks/attention.py --out results/ --configs ulysses=4 ring=4,plan=zigzag

The ideal of a problem is one causal kernel over all its tokens with a rank's part of the heads, on
all GPUs at once; for documents and windows, over a causal row of the same area. Each peer is a
launch of its own with its own time limit. Every candidate's output and gradients are first compared
with dense attention in float64 on a small problem; one that is wrong is reported and not timed.
Writes attention.jsonl and attention.md into --out; benchmarks/README.md says more.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import get_args

from config_text import config_of
from launch import end_with_children
from launches import check_all, make_parser, run_all, run_launch
from measure import Row
from operators import FASTEST
from problems import Problem, lognormal_lengths, share_of
from report import (
    Column,
    hardware,
    heading,
    is_ok,
    number,
    spread,
    table,
    write_lines,
)

from longctx_patch import Workload
from longctx_patch.config import HardwareName
from longctx_patch.planner.attention_cost import predict
from longctx_patch.planner.degrees import decide
from longctx_patch.planner.machines import MACHINES
from longctx_patch.plans import Direction

PEERS = ("ideal", "ours", "torch_cp", "ulysses")
HEADS = ("32/8", "32/32", "28/4")
TOKENS = (16384, 65536, 131072)


def make_problems(arguments: argparse.Namespace) -> list[Problem]:
    """Causal problems of all sizes; packed and windowed ones at the largest, with first heads."""
    head_pairs = [_heads(text) for text in arguments.heads]
    longest = max(arguments.tokens)
    shapes = list(product(head_pairs, arguments.tokens)) if "causal" in arguments.masks else []
    problems = [_problem(tokens, *pair, arguments.head_dim) for pair, tokens in shapes]
    plain = _problem(longest, *head_pairs[0], arguments.head_dim)
    if "packed" in arguments.masks:
        lengths = lognormal_lengths(longest, arguments.documents)
        problems.append(replace(plain, lengths=lengths))
    if "window" in arguments.masks:
        problems.append(replace(plain, window=arguments.window))
    return problems


def _heads(text: str) -> tuple[int, int]:
    try:
        query, kv = (int(number) for number in text.split("/"))
    except ValueError:
        raise SystemExit(f"--heads {text}: write query/key-value heads, such as 32/8") from None
    return query, kv


def _problem(tokens: int, heads: int, kv_heads: int, head_dim: int) -> Problem:
    return Problem(num_tokens=tokens, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


PASSED_ON = ("only", "configs", "kernels", "plans", "ideal_kernels", "iterations", "check_tokens")
"""Options that are passed on unchanged to the processes of a launch."""


def run_peer(
    problems: Sequence[Problem],
    arguments: argparse.Namespace,
    peer: str,
    _: int,
    before: Sequence[Row],
    limit_s: float,
) -> list[Row]:
    """The rows of one peer's candidates, and one more if the launch itself failed."""
    settings = {
        "peer": peer,
        "problems": [asdict(problem) for problem in problems],
        "fastest": fastest_ideals(before, problems),
        **{name: getattr(arguments, name) for name in PASSED_ON},
    }
    rows, ending = run_launch("attention_job.py", f"attention.{peer}", settings, arguments, limit_s)
    if ending.problem is not None:
        rows.append({"peer": peer, "candidate": "", "status": "failed", "reason": ending.problem})
    return rows


def fastest_ideals(rows: Sequence[Row], problems: Sequence[Problem]) -> dict[int, str]:
    """The kernel of the fastest ideal of each problem, by the problem's number."""
    ideals = [row for row in rows if row["peer"] == "ideal" and is_ok(row)]
    ideals.sort(key=lambda row: -row["seconds"])  # the fastest last: the dict keeps the last
    return {row["problem"]: row["candidate"] for row in ideals}


def with_ideals(rows: Sequence[Row], problems: Sequence[Problem], num_ranks: int) -> list[Row]:
    """Rows with their problem spelt out and, where timed, their share of the ideal."""
    ideals: dict[tuple[int, str], float] = {}
    for row in rows:
        if row["peer"] == "ideal" and is_ok(row):
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
    if not is_ok(row):
        return row
    seconds, ideal = row["seconds"], ideals.get((number, row["kernel"]))
    if row["peer"] == "ideal" and ideal is not None:
        seconds = ideal
    row["tflops_per_s_per_gpu"] = problem.flops / num_ranks / seconds * 1e-12
    fastest = ideals.get((number, FASTEST))
    if "ideal_beside_s" in row:  # measured in turn with the candidate, so at the same clocks
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
        if known and row["peer"] == "ours" and is_ok(row)
        else row
        for row in rows
    ]


def predicted_seconds(row: Row, problem: Problem, hardware: HardwareName) -> float:
    """Seconds of forward and backward that the cost model predicts for a row of ours."""
    config = replace(config_of(row["candidate"]), hardware=hardware)
    workload = Workload(
        num_tokens=problem.num_tokens,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        lengths=problem.lengths or (),
        window=problem.window,
    )
    setting, machine = decide(config, workload), MACHINES[hardware]
    return sum(predict(setting, way, workload, machine).makespan_s for way in Direction)


COLUMNS = (
    Column("peer", lambda row: row["peer"]),
    Column("candidate", lambda row: row["candidate"]),
    number("ms", "seconds", "{:.3f}", 1e3),
    spread("ms", 1e3),
    number("forward ms", "forward_s", "{:.3f}", 1e3),
    number("predicted ms", "predicted_s", "{:.3f}", 1e3),
    Column("kernel", lambda row: row.get("kernel")),
    number("ideal ms", "ideal_s", "{:.3f}", 1e3),
    number("share of ideal", "share_of_ideal", "{:.1%}"),
    number("share of fastest ideal", "share_of_fastest_ideal", "{:.1%}"),
    number("error / kernel's", "error_over_plain", "{:.2f}"),
    number("TFLOP/s/GPU", "tflops_per_s_per_gpu", "{:.0f}"),
    Column("note", lambda row: None if is_ok(row) else row["status"]),
    Column("reason", lambda row: row.get("reason")),
)


def by_speed(rows: Sequence[Row]) -> list[Row]:
    """The fastest rows first, rows that were not timed last."""
    return sorted(rows, key=lambda row: (row["status"] != "ok", row.get("seconds", 0.0)))


def write_report(
    problems: Sequence[Problem], arguments: argparse.Namespace, rows: Sequence[Row], where: Row
) -> None:
    """Complete the rows with shares and predictions, and write them with a table."""
    num_ranks, out = arguments.gpus, arguments.out
    rows = with_predictions(with_ideals(rows, problems, num_ranks), problems, where)
    write_lines([{**row, "machine": where} for row in rows], out / "attention.jsonl")
    title = f"The attention operator, forward and backward: {hardware(where, num_ranks)}"
    text = heading(title, where)
    text += (
        "Median of the slowest rank. The ideal is one causal kernel over all tokens with a rank's "
        "part of the heads, on all GPUs at once; of documents and windows, over a causal row of "
        "the same area, scaled. Each candidate's own kernel's ideal is timed by turns with it.\n\n"
    )
    for problem in problems:
        mine = by_speed([row for row in rows if row.get("problem") == str(problem)])
        run = [row for row in mine if row["status"] != "not covered"]
        text += f"## {problem}\n\n{table(COLUMNS, run)}\n{_not_covered(mine)}"
    launches = [row for row in rows if "problem" not in row]
    if launches:
        text += f"## Launches that failed\n\n{table(COLUMNS, launches)}\n"
    (out / "attention.md").write_text(text)


def _not_covered(rows: Sequence[Row]) -> str:
    """A line for each reason, with how many candidates have it."""
    counts = Counter(
        f"{row['peer']}: {row['reason']}" for row in rows if row["status"] == "not covered"
    )
    lines = [f"- not covered: {reason} ({count})\n" for reason, count in counts.items()]
    return "".join([*lines, "\n"]) if lines else ""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--tokens", type=int, nargs="+", default=TOKENS, help="of the sequence (16384 65536 131072)"
    )
    add("--heads", nargs="+", default=HEADS, help="query/key-value heads, such as 32/8")
    add("--head-dim", type=int, default=128)
    masks = ["causal", "packed", "window"]
    add("--masks", nargs="+", default=masks, choices=masks, help="default: all")
    add("--documents", type=int, default=64, help="log-normal ones in the packed row")
    add("--window", type=int, default=4096)
    add(
        "--peers",
        nargs="+",
        default=PEERS,
        help="without ideal no shares, and no bound on the errors of auto; also module.names",
    )
    add("--only", nargs="+", help="patterns of 'peer: candidate', such as 'ours: ulysses=*'")
    add("--configs", nargs="+", help="ours, in place of the grid: ulysses=2,ring=2,plan=zigzag")
    add("--plans", nargs="+", help="ours: plans of the grid")
    add("--kernels", nargs="+", help="ours: kernels of the grid (default auto)")
    add("--ideal-kernels", nargs="+", help="default: all fast ones")
    add("--iterations", type=int, default=10, help="timed calls (default 10)")
    add("--check-tokens", type=int, default=4096, help="of the problem compared (default 4096)")
    parsed = parser.parse_args(arguments)
    check_all(parser, config_of, parsed.configs or ())
    return parsed


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    problems = make_problems(arguments)
    launch = partial(run_peer, problems, arguments)
    report = partial(write_report, problems, arguments)
    peers = sorted(arguments.peers, key=lambda peer: peer != "ideal")  # others are compared with it
    run_all("attention", peers, launch, report, arguments)


if __name__ == "__main__":
    end_with_children()
    main()
