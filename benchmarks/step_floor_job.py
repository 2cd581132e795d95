"""One launch of step.py: how fast kernels alone are here, and the step that they would allow.

The floor of a step has attention of every layer at the rate of one causal kernel over all tokens
with a rank's part of the heads, matrix products at the rate of a large one, forward and backward,
nothing recomputed, and all else hidden behind them. Rates are measured on all GPUs at once, and for
as long as it takes them to get warm.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention_job import timed_by_turns, turn_of
from measure import Clock, Row, dtype_on, finish, is_first_rank, start
from model_shapes import model_shape
from operators import Job, NotCovered, ideal
from problems import Problem
from report import append_line

from longctx_patch.planner.model_shape import ModelShape

MATMUL_SIZE = {"cuda": 8192, "cpu": 256}
MATMUL_CALLS = {"cuda": 1500, "cpu": 5}  # two seconds: clocks fall as a GPU gets warm


def matmul_flops_per_s(clock: Clock) -> float:
    size = MATMUL_SIZE[clock.device.type]
    a, b = torch.randn(2, size, size, device=clock.device, dtype=dtype_on(clock.device))
    long = replace(clock, iterations=MATMUL_CALLS[clock.device.type])
    return 2 * size**3 / long.device_time(lambda: a @ b).seconds


def floor_s(
    shape: ModelShape, num_tokens: int, num_ranks: int, attention_s: float, rate: float
) -> float:
    """Seconds of a step; `attention_s` is of one layer, `rate` of matrix products in FLOP/s."""
    linear_flops = 6 * shape.active_weights * num_tokens / num_ranks
    return shape.num_layers * attention_s + linear_flops / rate


def measure(settings: dict[str, Any], num_tokens: int, job: Job, clock: Clock, rate: float) -> Row:
    shape = model_shape(settings)
    problem = Problem(
        num_tokens=num_tokens,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    kernels: dict[str, Row] = {}
    for candidate in ideal.candidates(job):
        mine = candidate.problem_of(problem)
        try:
            forward, (both,) = timed_by_turns([turn_of(candidate, mine, clock.device)], clock)
        except (NotCovered, RuntimeError) as error:
            kernels[candidate.name] = {"reason": str(error)[:200]}
            continue
        kernels[candidate.name] = {
            "forward_s": forward.seconds,
            "backward_s": both.seconds - forward.seconds,
            "floor_s": floor_s(shape, num_tokens, job.num_ranks, both.seconds, rate),
        }
    floors = [found["floor_s"] for found in kernels.values() if "floor_s" in found]
    return {
        "num_tokens": num_tokens,
        "status": "ok" if floors else "failed",
        "reason": None if floors else "; ".join(f"{k}: {x['reason']}" for k, x in kernels.items()),
        "seconds": min(floors, default=None),
        "matmul_tflops_per_s": rate * 1e-12,
        "kernels": kernels,
    }


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    job = Job.of_this_process(start(), {"ideal_kernels": settings["floor_kernels"]})
    clock = Clock(job.device, settings["steps"])
    rate = matmul_flops_per_s(clock)
    for num_tokens in settings["tokens"]:
        row = measure(settings, num_tokens, job, clock, rate)
        if is_first_rank():
            append_line({"system": "floor", **row}, Path(settings["lines"]))
    finish()


if __name__ == "__main__":
    main()
