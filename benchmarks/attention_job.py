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
from functools import lru_cache, partial
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
    start,
)
from operators import FASTEST, Candidate, Job, NotCovered, Prepared, ideal, ours
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

from longctx_patch.kernels import KernelRequest, available

SHARDS_SEED = 1
ENOUGH_S = 0.5
LEAST_ITERATIONS = 2
TURNS = 3
BOTH_OVER_FORWARD = 4  # time of forward and backward over forward, about; 3.5 by FLOPs
MOST_OVER_PLAIN = 2.0  # largest allowed error, over that of the kernel alone


def gradients(prepared: Prepared, shards: Shards) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of one forward and backward."""
    q, k, v = (x.requires_grad_() for x in shards[:3])
    out = prepared.run(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), shards.dout)


class Check(NamedTuple):
    """How far a candidate's results are from dense attention in float64, on the worst rank."""

    mine: dict[str, Difference]
    plain: dict[str, Difference] | None
    """The differences of its kernel in one process, if this machine has the kernel."""

    @property
    def error_over_plain(self) -> float | None:
        """The largest ratio of errors over the results; None if this machine lacks the kernel."""
        if self.plain is None:
            return None
        return max(self.mine[name].whole / self.plain[name].whole for name in RESULTS)


def check(prepared: Prepared, problem: Problem, kernel: str | None, device: torch.device) -> Check:
    """Compare a candidate with dense attention on a small problem. Collective."""
    whole, right = dense_results(problem, device)
    shards = Shards(*(x[:, prepared.positions].contiguous() for x in whole))
    with prepared.scope():
        mine = gradients(prepared, shards)
    rights = [x[:, prepared.positions] for x in right]
    plain = None if kernel is None else plain_results(kernel, problem, device)
    worst = _worst_rank(mine, rights)
    if plain is None:
        return Check(worst, None)
    return Check(worst, _worst_rank([x[:, prepared.positions] for x in plain], rights))


def _worst_rank(mine: Sequence[Tensor], right: Sequence[Tensor]) -> dict[str, Difference]:
    """For each result, the largest differences of any rank. Collective."""
    pairs = zip(RESULTS, mine, right, strict=True)
    ranks = everyone({name: tuple(difference(x.detach(), y)) for name, x, y in pairs})
    # amax(), unlike max(), takes NaN for the largest.
    return {
        name: Difference(*torch.tensor([rank[name] for rank in ranks]).amax(0).tolist())
        for name in RESULTS
    }


@lru_cache(maxsize=8)
def plain_results(kernel: str, problem: Problem, device: torch.device) -> tuple[Tensor, ...] | None:
    """(out, dq, dk, dv) of all tokens by one kernel in this process alone. Collective.

    None if this machine doesn't have the kernel.
    """
    if not is_here(kernel, problem, device):
        return None
    alone = Job(device, 0, 1, {"configs": [f"kernel={kernel}"]})
    (candidate,) = ours.candidates(alone)
    whole, _ = dense_results(problem, device)
    return gradients(candidate.prepare(problem), Shards(*(x.clone() for x in whole)))


def is_here(kernel: str, problem: Problem, device: torch.device) -> bool:
    """Whether this machine has a kernel of this name that takes the problem's heads."""
    found = available().get(kernel)
    request = KernelRequest(device.type, dtype_on(device), problem.head_dim)
    return found is not None and found.refuses(request) is None


def is_right(found: dict[str, Difference], dtype: torch.dtype) -> bool:
    allowed = TOLERANCES[dtype]
    return all(
        value.whole <= allowed.whole and value.worst_token <= allowed.worst_token
        for value in found.values()
    )


def is_as_exact(found: Check, dtype: torch.dtype) -> bool:
    """Whether no error is more than twice that of the kernel alone, plus rounding."""
    if found.plain is None:
        return True
    rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return all(
        found.mine[name].whole <= MOST_OVER_PLAIN * found.plain[name].whole + 10 * rounding
        for name in RESULTS
    )


class Turn(NamedTuple):
    """A candidate or its ideal, which are timed in turn."""

    prepared: Prepared
    shards: Shards


def timed_by_turns(turns: Sequence[Turn], clock: Clock) -> tuple[Timing, list[Timing]]:
    """(forward of the first, forward and backward of each). Collective.

    They take turns, since clocks fall as GPUs get warm, by more than the differences of interest.
    """
    first = turns[0]
    with first.prepared.scope(), torch.no_grad():
        forward = about_a_second(lambda: first.prepared.run(*first.shards[:3]), clock)
    iterations = _fitting(BOTH_OVER_FORWARD * forward.seconds, clock)
    short = replace(clock, iterations=iterations, warm_up_calls=1)
    found: list[list[Timing]] = [[] for _ in turns]
    for _ in range(TURNS):
        for turn, timings in zip(turns, found, strict=True):
            with turn.prepared.scope():
                timings.append(short.device_time(partial(gradients, *turn)))
    return forward, [_of_turns(timings) for timings in found]


def _of_turns(timings: Sequence[Timing]) -> Timing:
    return Timing(
        median(timing.seconds for timing in timings),
        min(timing.p20_s for timing in timings),
        max(timing.p80_s for timing in timings),
    )


def turn_of(candidate: Candidate, problem: Problem, device: torch.device) -> Turn:
    """A candidate, ready for a problem, with random shards. Collective."""
    prepared = candidate.prepare(problem)
    return Turn(prepared, random_shards(problem, len(prepared.positions), device, SHARDS_SEED))


def ideal_turn(kernel: str, problem: Problem, job: Job) -> Turn | None:
    """The ideal of a kernel; None where this machine doesn't have it. Collective."""
    if not is_here(kernel, problem, job.device):
        return None
    (found,) = ideal.candidates(replace(job, settings={"ideal_kernels": [kernel]}))
    return turn_of(found, found.problem_of(problem), job.device)


def about_a_second(call: Callable[[], object], clock: Clock) -> Timing:
    """Time as many calls as the clock says, or fewer if a call takes long. Collective."""
    first = replace(clock, iterations=1).device_time(call)
    return replace(clock, iterations=_fitting(first.seconds, clock), warm_up_calls=0).device_time(
        call
    )


def _fitting(seconds: float, clock: Clock) -> int:
    return max(LEAST_ITERATIONS, min(int(ENOUGH_S / max(seconds, 1e-9)), clock.iterations))


Checks = dict[tuple[Problem, str | None], Check]
"""What was found for one candidate on the small problems so far, by problem and kernel."""


def measure(
    candidate: Candidate,
    problem: Problem,
    fastest: str | None,
    job: Job,
    clock: Clock,
    checks: Checks,
) -> Row:
    """A candidate's row: timed only if its results are right, in turn with its ideal. Collective.

    `fastest` is the kernel whose ideal is taken for candidates that choose their kernel themselves.
    """
    whole, problem = problem, candidate.problem_of(problem)
    checked = small(problem, job.settings["check_tokens"])
    kernel = fastest if candidate.kernel == FASTEST else candidate.kernel
    try:
        key = (checked, kernel)
        if key not in checks:
            checks[key] = check(candidate.prepare(checked), checked, kernel, clock.device)
        found = checks[key]
        row: Row = {
            "differences": {name: value._asdict() for name, value in found.mine.items()},
            "error_over_plain": found.error_over_plain,
            "checked": asdict(checked),
        }
        if not is_right(found.mine, dtype_on(clock.device)):
            return row | {"status": "wrong", "reason": _worst(found.mine)}
        if job.settings["peer"] == "ours" and not is_as_exact(found, dtype_on(clock.device)):
            reason = f"{found.error_over_plain:.2f} times the error of {kernel} alone"
            return row | {"status": "wrong", "reason": reason}
        turns = [turn_of(candidate, problem, clock.device)]
        if job.settings["peer"] != "ideal" and kernel is not None:
            beside = ideal_turn(kernel, whole, job)
            turns += [] if beside is None else [beside]
        forward, (both, *best) = timed_by_turns(turns, clock)
        if best:
            row["ideal_beside_s"] = best[0].seconds
    except NotCovered as reason:
        return {"status": "not covered", "reason": str(reason)}
    except Exception as error:  # a peer's code may raise anything: the next candidate goes on
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
    job = Job.of_this_process(start(), settings)
    clock = Clock(job.device, settings["iterations"])
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
