"""One launch of step.py: a system at each length, first compared with one process, then timed.

Started by step.py with a file that says what to do; appends a line of JSON for each length.
"""

import gc
import importlib
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from config_text import options_of
from measure import Clock, Row, Timing, dtype_on, everyone, finish, own_device, slowest
from model_shapes import model_config, sizes_of
from report import append_line
from step_profile import profiled
from systems import Job, NotCovered, System
from systems.model import checked_names, make_model, one_process, random_row

OUT_OF_MEMORY = "out of memory"
LOSS_TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}  # relative; bfloat16 on CUDA, float32 on CPU
GRADIENT_TOLERANCE = {"cuda": 5e-2, "cpu": 1e-3}


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of all ranks' losses. Collective."""
    ranks = everyone(float(loss.detach()))
    return sum(ranks) / len(ranks)


def compare(system: System, row: torch.Tensor, expected: dict[str, float]) -> Row:
    """Make one step on a small row, and compare its numbers with one process. Collective."""
    system.load(row)
    loss = system.loss()
    system.backward(loss)
    found = {"loss": mean_over_ranks(loss)}
    found |= {name: system.gradient_norm(name) for name in expected if name != "loss"}
    system.update()
    return compared(row.shape[1], found, expected)


def compared(num_tokens: int, found: dict[str, float], expected: dict[str, float]) -> Row:
    """A step's numbers beside those of one process, for the JSON; NaN where one is missing."""
    found = {name: found.get(name, math.nan) for name in expected}
    return {
        "num_tokens": num_tokens,
        "one_process": expected,
        "system": found,
        "differences": {name: relative(found[name], expected[name]) for name in expected},
    }


def relative(found: float, expected: float) -> float:
    return abs(found / expected - 1) if expected else math.inf


def what_is_wrong(comparison: Row, device_type: str) -> str | None:
    """The first number that is off by more than rounding, NaN included; None if all are right."""
    for name, difference in comparison["differences"].items():
        limits = LOSS_TOLERANCE if name == "loss" else GRADIENT_TOLERANCE
        if not difference <= limits[device_type]:
            value, right = comparison["system"][name], comparison["one_process"][name]
            return (
                f"{name} of {comparison['num_tokens']:,} tokens is {value:.6g}, in one process "
                f"{right:.6g}: off by {difference:.2g}, allowed is {limits[device_type]:g}"
            )
    return None


def one_step(system: System) -> torch.Tensor:
    loss = system.loss()
    system.backward(loss)
    system.update()
    return loss.detach()


def measure(
    system: System, row: torch.Tensor, job: Job, settings: dict[str, Any], expected: float | None
) -> Row:
    """The time of a step over `row`, if its loss is as expected. Collective."""
    system.load(row)
    losses = [mean_over_ranks(one_step(system))]
    limit = LOSS_TOLERANCE[job.device.type]
    if expected is not None and not relative(losses[0], expected) <= limit:
        reason = f"the first loss is {losses[0]:.6g}, ours {expected:.6g}: allowed is {limit:g}"
        return {"status": "wrong", "reason": reason, "losses": losses}
    for _ in range(system.warm_up_steps - 1):
        losses.append(mean_over_ranks(one_step(system)))
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock, seconds, peaks = Clock(job.device, settings["steps"]), [], []
    for _ in range(settings["steps"]):
        clock.meet()
        started = perf_counter()
        loss = one_step(system)
        if job.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - started)
        peaks.append(peak_bytes(job.device))  # of each step: `checkpoint=auto` resets the counter
        losses.append(mean_over_ranks(loss))
    ranks = everyone(seconds)
    slowest_ranks = [max(step) for step in zip(*ranks, strict=True)]
    result = {
        "status": "ok",
        **slowest(slowest_ranks)._asdict(),
        **rates(slowest(slowest_ranks), row.shape[1], job, system.rows_at_once),
        **largest(peaks),
        "losses": losses,
        "steps_s": slowest_ranks,
        **system.details(),
    }
    if settings["profile"]:
        result["profile"] = profiled(lambda: one_step(system), job.device)
    return result


def rates(timing: Timing, num_tokens: int, job: Job, num_rows: int) -> Row:
    per_rank = num_rows / timing.seconds / job.num_ranks
    return {
        "tokens_per_s_per_gpu": num_tokens * per_rank,
        "model_tflops_per_s_per_gpu": job.shape.step_flops(num_tokens) * per_rank * 1e-12,
    }


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) peaks since the counters were last reset; zeros on the CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def largest(peaks: Sequence[tuple[int, int]]) -> Row:
    """The largest peaks of all timed steps and ranks. Collective."""
    ranks = [peak for mine in everyone(list(peaks)) for peak in mine]
    allocated, reserved = (max(values) for values in zip(*ranks, strict=True))
    return {"peak_allocated_gib": allocated / 2**30, "peak_reserved_gib": reserved / 2**30}


def build(job: Job, settings: dict[str, Any]) -> tuple[System, Row]:
    """(the system, how it compares with one process on a small row). Collective."""
    name, _, options = settings["system"].partition(":")
    longest = max(*settings["tokens"], settings["check_tokens"])
    config = model_config(settings["model"], settings["num_layers"], longest)
    model = make_model(config, job.device, dtype_on(job.device))
    small = random_row(settings["check_tokens"], job.shape.vocab_size, job.device)
    expected = one_process(model, small, job.shape.num_layers)
    names = checked_names(model, job.shape.num_layers)
    assert names
    assert expected.keys() == {"loss", *names}
    module = importlib.import_module(name if "." in name else f"systems.{name}")
    system: System = module.build(job, model, options_of(options))
    if not system.learns_all:
        expected = {"loss": expected["loss"]}
    return system, compare(system, small, expected)


def run(job: Job, settings: dict[str, Any]) -> None:
    """Append a row for each length, or one for all lengths if the system isn't covered or right."""

    def say(row: Row) -> None:
        if job.rank == 0:
            append_line({"system": settings["system"], **row}, Path(settings["lines"]))

    try:
        system, comparison = build(job, settings)
        wrong = what_is_wrong(comparison, job.device.type)
    except NotCovered as reason:
        say({"status": "not covered", "reason": str(reason)})
        return
    if wrong is not None:
        say({"status": "wrong", "reason": wrong, "check": comparison})
        return
    for num_tokens in settings["tokens"]:
        row = random_row(num_tokens, job.shape.vocab_size, job.device)
        expected = settings["expected_losses"].get(str(num_tokens))
        try:
            found = measure(system, row, job, settings, expected)
        except torch.OutOfMemoryError as error:
            # Other ranks may have memory left and wait for this one: the launch ends here.
            say({"num_tokens": num_tokens, "status": OUT_OF_MEMORY, "reason": _first(error)})
            print(f"OutOfMemoryError: {num_tokens} tokens: {_first(error)}", flush=True)
            os._exit(1)
        say({"num_tokens": num_tokens, **found, "check": comparison})
        gc.collect()
    system.close()


def _first(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run(Job(own_device(), rank, num_ranks, sizes_of(settings)), settings)
    finish()


if __name__ == "__main__":
    main()
