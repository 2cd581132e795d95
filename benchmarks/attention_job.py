"""One launch of attention.py: the candidates of one peer, each checked and then timed.

Started by attention.py with a file that says what to do; appends a line of JSON for each candidate
and problem, so that what was measured before a crash or a hang stays.
"""

import fnmatch
import gc
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from measure import (
    Clock,
    Row,
    Timing,
    dtype_on,
    everyone,
    finish,
    is_first_rank,
    num_processes,
    start,
)
from operators import FASTEST, Candidate, Job, NotCovered, Prepared, ideal
from problems import (
    RESULTS,
    TOLERANCES,
    Difference,
    Problem,
    Shards,
    dense_results,
    difference,
    random_shards,
    small,
)
from report import append_line
from torch import Tensor

SHARDS_SEED = 1
ENOUGH_S = 1.0
LEAST_ITERATIONS = 3
TURNS = 3


def gradients(prepared: Prepared, shards: Shards) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of one forward and backward."""
    q, k, v = (x.requires_grad_() for x in shards[:3])
    out = prepared.run(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), shards.dout)


def check(prepared: Prepared, problem: Problem, device: torch.device) -> dict[str, Difference]:
    """How far each result is from dense attention in float64, on the worst rank. Collective."""
    whole, right = dense_results(problem, device)
    shards = Shards(*(x[:, prepared.positions].contiguous() for x in whole))
    with prepared.scope():
        mine = gradients(prepared, shards)
    found = {
        name: difference(x.detach(), y[:, prepared.positions])
        for name, x, y in zip(RESULTS, mine, right, strict=True)
    }
    ranks = everyone({name: tuple(value) for name, value in found.items()})
    # amax(), unlike max(), takes NaN for the largest.
    return {
        name: Difference(*torch.tensor([rank[name] for rank in ranks]).amax(0).tolist())
        for name in RESULTS
    }


def is_right(found: dict[str, Difference], dtype: torch.dtype) -> bool:
    allowed = TOLERANCES[dtype]
    return all(
        value.whole <= allowed.whole and value.worst_token <= allowed.worst_token
        for value in found.values()
    )


def timed(prepared: Prepared, problem: Problem, clock: Clock) -> tuple[Timing, Timing]:
    """(forward alone, forward and backward). Collective."""
    shards = random_shards(problem, len(prepared.positions), clock.device, SHARDS_SEED)
    with prepared.scope():
        with torch.no_grad():
            forward = about_a_second(lambda: prepared.run(*shards[:3]), clock)
        return forward, about_a_second(lambda: gradients(prepared, shards), clock)


class Turn(NamedTuple):
    """What is timed by turns with something else."""

    prepared: Prepared
    shards: Shards


def timed_beside_ideal(mine: Turn, beside: Turn, clock: Clock) -> tuple[Timing, Timing, Timing]:
    """(forward, forward and backward, the ideal's forward and backward). Collective.

    By turns, since clocks fall as GPUs get warm: by more than what is to be told apart.
    """
    with mine.prepared.scope(), torch.no_grad():
        forward = about_a_second(lambda: mine.prepared.run(*mine.shards[:3]), clock)
    short = replace(clock, iterations=_fitting(forward.seconds, clock), warm_up_calls=1)
    found: tuple[list[Timing], list[Timing]] = ([], [])
    for _ in range(TURNS):
        for turn, timings in zip((mine, beside), found, strict=True):
            with turn.prepared.scope():
                timings.append(short.device_time(partial(gradients, *turn)))
    of_mine, of_ideal = (_of_turns(timings) for timings in found)
    return forward, of_mine, of_ideal


def _of_turns(timings: Sequence[Timing]) -> Timing:
    return Timing(
        median(timing.seconds for timing in timings),
        min(timing.p20_s for timing in timings),
        max(timing.p80_s for timing in timings),
    )


def ideal_turn(
    candidate: Candidate, problem: Problem, fastest: str | None, job: Job
) -> Turn | None:
    """The ideal of a candidate's kernel; None where this machine doesn't have it. Collective."""
    name = fastest if candidate.kernel == FASTEST else candidate.kernel
    if name is None:
        return None
    (found,) = ideal.candidates(replace(job, settings={"ideal_kernels": [name]}))
    mine = found.problem_of(problem)
    try:
        prepared = found.prepare(mine)
    except (NotCovered, KeyError):
        return None
    shards = random_shards(mine, len(prepared.positions), job.device, SHARDS_SEED)
    return Turn(prepared, shards)


def about_a_second(call: Callable[[], object], clock: Clock) -> Timing:
    """The clock's iterations, or fewer of a call that takes long. Collective."""
    first = replace(clock, iterations=1).device_time(call)
    return replace(clock, iterations=_fitting(first.seconds, clock), warm_up_calls=0).device_time(
        call
    )


def _fitting(seconds: float, clock: Clock) -> int:
    return max(LEAST_ITERATIONS, min(int(ENOUGH_S / max(seconds, 1e-9)), clock.iterations))


Checks = dict[Problem, dict[str, Difference]]
"""Of one candidate: what was found for the small problems so far."""


def measure(
    candidate: Candidate,
    problem: Problem,
    fastest: str | None,
    job: Job,
    clock: Clock,
    checks: Checks,
) -> Row:
    """A row: timed only if its results are right, beside its kernel's ideal. Collective.

    `fastest`: the kernel of whoever chooses by itself.
    """
    whole, problem = problem, candidate.problem_of(problem)
    checked = small(problem, job.settings["check_tokens"])
    try:
        if checked not in checks:
            checks[checked] = check(candidate.prepare(checked), checked, clock.device)
        found = checks[checked]
        row: Row = {
            "differences": {name: value._asdict() for name, value in found.items()},
            "checked": asdict(checked),
        }
        if not is_right(found, dtype_on(clock.device)):
            return row | {"status": "wrong", "reason": _worst(found)}
        prepared = candidate.prepare(problem)
        is_ideal = job.settings["peer"] == "ideal"
        beside = None if is_ideal else ideal_turn(candidate, whole, fastest, job)
        if beside is None:
            forward, both = timed(prepared, problem, clock)
        else:
            shards = random_shards(problem, len(prepared.positions), clock.device, SHARDS_SEED)
            forward, both, best = timed_beside_ideal(Turn(prepared, shards), beside, clock)
            row["ideal_beside_s"] = best.seconds
    except NotCovered as reason:
        return {"status": "not covered", "reason": str(reason)}
    except Exception as error:  # of a peer's code, whatever it may be: the next one goes on
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
    finally:
        gc.collect()
        if clock.on_cuda:
            torch.cuda.empty_cache()
    return row | {"status": "ok", "forward_s": forward.seconds, **both._asdict()}


def _worst(found: dict[str, Difference]) -> str:
    return ", ".join(
        f"{name} is off by {value.whole:.2g}, a token by {value.worst_token:.2g}"
        for name, value in found.items()
    )


def load(peer: str, job: Job) -> list[Candidate]:
    """The candidates of a module of `operators`, or of any importable one."""
    name = peer if "." in peer else f"operators.{peer}"
    candidates: list[Candidate] = importlib.import_module(name).candidates(job)
    wanted: Sequence[str] = job.settings.get("only") or ("*",)
    return [
        candidate
        for candidate in candidates
        if peer == "ideal"
        or any(fnmatch.fnmatchcase(f"{peer}: {candidate.name}", pattern) for pattern in wanted)
    ]


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    device = start()
    rank = torch.distributed.get_rank() if num_processes() > 1 else 0
    job = Job(device, rank, num_processes(), settings)
    clock = Clock(device, settings["iterations"])
    problems = [
        Problem(**fields | {"lengths": fields["lengths"] and tuple(fields["lengths"])})
        for fields in settings["problems"]
    ]
    for candidate in load(settings["peer"], job):
        checks: Checks = {}
        for number, problem in enumerate(problems):
            names = {"peer": settings["peer"], "candidate": candidate.name, "problem": number}
            fastest = settings["fastest"].get(str(number))
            row = measure(candidate, problem, fastest, job, clock, checks)
            if is_first_rank():
                append_line({**names, "kernel": candidate.kernel, **row}, Path(settings["lines"]))
        candidate.close()
    finish()


if __name__ == "__main__":
    main()
