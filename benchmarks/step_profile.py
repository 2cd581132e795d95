"""Where the time of a training step goes: a table by part, from what ran on one GPU.

Every instant of the step belongs to one part. Computing comes first: communication counts only
while nothing else runs. This is the time that better overlap could save.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measure import Row, everyone

from longctx_patch.loss.linear_head import LinearHead

STEP = "benchmark step"
IDLE = "idle"
COMMUNICATION = "exposed communication"
# While several parts run at once, the time counts for the first of them in this order.
PARTS = (
    "attention backward",
    "attention forward",
    "loss",
    "linear",
    "optimizer",
    "elementwise",
    "FSDP",
    COMMUNICATION,
    IDLE,
)
ATTENTION = ("flash", "fmha", "sdpa", "attention", "dot_do_o", "convert_dq")
BACKWARD = ("bwd", "backward", "bprop", "dot_do_o", "convert_dq", "dgrad")
LINEAR = ("gemm", "nvjet", "cublas", "cutlass", "matmul")
LOSS = ("cross_entropy", "softmax", "nll_loss", "logprob")
OPTIMIZER = ("multi_tensor_apply", "adam")
FSDP_COLLECTIVES = ("allgather", "all_gather", "reducescatter", "reduce_scatter")
FSDP_COPIES = ("chunk_cat", "split_with_sizes")


@dataclass(frozen=True)
class Activity:
    """A kernel or a copy on the GPU."""

    name: str
    start_us: float
    stop_us: float
    ranges: tuple[str, ...] = ()
    """Names of the `record_function` ranges that it was started in."""


def part_of(activity: Activity) -> str:
    """The part of the step that a kernel belongs to, from its name and ranges."""
    name = activity.name.lower()
    ranges = " ".join(activity.ranges).lower()
    if name.startswith("nccl") or "memcpy ptop" in name:
        belongs = "fsdp" in ranges or _any(FSDP_COLLECTIVES, name)
        return "FSDP" if belongs else COMMUNICATION
    if "fsdp" in ranges or _any(FSDP_COPIES, name):  # its casts are multi_tensor_apply too
        return "FSDP"
    if "optimizer" in ranges or _any(OPTIMIZER, name):
        return "optimizer"
    if _any(ATTENTION, name):
        return "attention backward" if _any(BACKWARD, name) else "attention forward"
    if "loss" in ranges.split() or _any(LOSS, name):
        return "loss"
    return "linear" if _any(LINEAR, name) else "elementwise"


def _any(words: Iterable[str], text: str) -> bool:
    return any(word in text for word in words)


def microseconds_by_part(
    activities: Sequence[Activity], start_us: float, stop_us: float
) -> dict[str, float]:
    """The time of each part from `start_us` to `stop_us`; the parts add up to the whole step."""
    edges = []
    for activity in activities:
        begin, end = max(activity.start_us, start_us), min(activity.stop_us, stop_us)
        if begin < end:
            part = part_of(activity)
            edges += [(begin, 1, part), (end, -1, part)]
    totals, running = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0)
    now = start_us
    for moment, change, part in sorted(edges):
        totals[_first_running(running)] += moment - now
        running[part] += change
        now = moment
    totals[IDLE] += stop_us - now
    return totals


def _first_running(running: dict[str, int]) -> str:
    return next((part for part in PARTS if running[part]), IDLE)


def activities_of(trace: dict[str, Any]) -> tuple[list[Activity], float, float]:
    """(what ran on the GPU, start, stop) of the step in a trace of torch.profiler."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"]
    start, stop = steps[0]["ts"], steps[0]["ts"] + steps[0]["dur"]
    streams = defaultdict(list)
    for event in events:
        streams[event["pid"], event["tid"]].append(event)
    found: list[Activity] = []
    for stream in streams.values():
        found += _with_ranges(stream)
    return found, start, stop


def _with_ranges(events: Sequence[dict[str, Any]]) -> list[Activity]:
    """The kernels of one stream, each with the ranges that contain it."""
    found: list[Activity] = []
    open_ranges: list[dict[str, Any]] = []
    # A range is sorted before a kernel that starts at the same time.
    for event in sorted(events, key=lambda e: (e["ts"], e.get("cat") != "gpu_user_annotation")):
        if event.get("cat") == "gpu_user_annotation":
            open_ranges.append(event)
        elif event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, stop = event["ts"], event["ts"] + event["dur"]
            open_ranges = [e for e in open_ranges if e["ts"] + e["dur"] > start]
            names = tuple(e["name"] for e in open_ranges)
            found.append(Activity(event["name"], start, stop, names))
    return found


@contextmanager
def named_loss() -> Iterator[None]:
    """Record what a patched model's head starts in a `record_function` range named loss.

    The head itself stays as it is: one with a hook or a forward of its own would make full logits.
    """
    walk = LinearHead.walk

    def within(*args: Any) -> Any:
        with torch.profiler.record_function("loss"):
            return walk(*args)

    with patch.object(LinearHead, "walk", within):
        yield


def profiled(step: Callable[[], object], device: torch.device) -> Row | None:
    """One step's milliseconds by part on rank 0; None without a GPU.

    Collective: every rank runs two steps, of which the second counts. All ranks are recorded, since
    one that is slowed down by recording would make the others wait. `by_rank` has each rank's
    milliseconds, `kernels` the kernels of rank 0 that take most time, to judge the table by, `gaps`
    the longest times in which nothing ran there. What the model's head runs in forward counts as
    loss: a chunked loss computes its gradients there.
    """
    if device.type != "cuda":
        for _ in range(2):
            step()
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with named_loss(), torch.profiler.profile(activities=activities) as profile:
        step()  # the profiler's own start is slow
        torch.cuda.synchronize()
        with torch.profiler.record_function(STEP):
            step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        found, start, stop = activities_of(json.loads(file.read_text()))
    found = [a for a in found if a.start_us < stop and a.stop_us > start]
    parts = microseconds_by_part(found, start, stop)
    ranks = everyone({part: value / 1e3 for part, value in parts.items()})
    return {
        "milliseconds": ranks[0],
        "by_rank": ranks,
        "kernels": _longest(found),
        "gaps": gaps(found, start, stop),
    }


def gaps(
    activities: Sequence[Activity], start_us: float, stop_us: float, count: int = 10
) -> list[Row]:
    """The longest times within a step in which nothing ran, with what ran before and after."""
    found, busy_until, before = list[Row](), start_us, "the step's start"
    end = Activity("the step's end", stop_us, stop_us)
    for activity in (*sorted(activities, key=lambda each: each.start_us), end):
        idle = activity.start_us - busy_until
        names = {"before": before[:120], "after": activity.name[:120]}
        found.append({"milliseconds": idle / 1e3, "at": (busy_until - start_us) / 1e3, **names})
        if activity.stop_us > busy_until:
            busy_until, before = activity.stop_us, activity.name
    return sorted(found, key=lambda row: -row["milliseconds"])[:count]


def _longest(activities: Sequence[Activity], count: int = 40) -> list[Row]:
    """The kernels that took most time, with their part."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(list)
    for activity in activities:
        duration = activity.stop_us - activity.start_us
        totals[activity.name[:120], part_of(activity)].append(duration)
    by_time = sorted(totals.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {"kernel": name, "part": part, "milliseconds": sum(times) / 1e3, "calls": len(times)}
        for (name, part), times in by_time
    ]
