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
from pathlib import Path
from typing import Any

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
from operators import Candidate, Job, NotCovered, Prepared
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


def about_a_second(call: Callable[[], object], clock: Clock) -> Timing:
    """The clock's iterations, or fewer of a call that takes long. Collective."""
    first = replace(clock, iterations=1).device_time(call)
    fitting = int(ENOUGH_S / max(first.seconds, 1e-9))
    iterations = max(LEAST_ITERATIONS, min(fitting, clock.iterations))
    return replace(clock, iterations=iterations, warm_up_calls=0).device_time(call)


Checks = dict[Problem, dict[str, Difference]]
"""Of one candidate: what was found for the small problems so far."""


def measure(
    candidate: Candidate, problem: Problem, check_tokens: int, clock: Clock, checks: Checks
) -> Row:
    """A row: timed only if its results are right. Collective."""
    problem = candidate.problem_of(problem)
    checked = small(problem, check_tokens)
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
        forward, both = timed(candidate.prepare(problem), problem, clock)
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
            row = measure(candidate, problem, settings["check_tokens"], clock, checks)
            if is_first_rank():
                append_line({**names, "kernel": candidate.kernel, **row}, Path(settings["lines"]))
        candidate.close()
    finish()


if __name__ == "__main__":
    main()
