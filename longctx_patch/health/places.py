"""Finds where a process is from the frames of its threads: its layer, and the exchange in it.

Nothing is recorded beforehand, so a run that is all right pays nothing for it. Frames of backward
are found in autograd's threads as well; torch's flight recorder of NCCL says what a GPU waits for.
"""

import pickle
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

OWN_THREADS = "longctx-watchdog"
"""Begins the names of threads that watch, which are not where a process is."""
_WAITING = ("torch/distributed/", "longctx_patch/transport/", "torch/autograd/graph.py")
"""Files whose functions wait for other ranks, or for backward, in which DDP does."""


class Place(NamedTuple):
    code: str
    """File, line and function of the innermost frame."""
    layer: int | None = None
    direction: str = ""
    exchange: str = ""
    waits_for: tuple[int, ...] = ()
    """Global ranks that the exchange gets something from, where that is known."""
    waits: bool = False
    """Whether the innermost frame is one that waits for other ranks."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}"
        ranks = ", ".join(map(str, self.waits_for))
        waits = f"waits for rank {ranks}" if ranks else ""
        parts = [part for part in (layer, self.direction, self.exchange, waits) if part]
        return ", ".join([*parts, f"at {self.code}"])


def place_here() -> Place:
    """Returns where this process is: in the thread that is in an exchange, else in the main one. Of
    several in an exchange the training is meant, which one that saves beside it must not hide."""
    main = threading.main_thread().ident
    started = {thread.ident for thread in threading.enumerate()} - {main}
    found = {n: place_of(list(_outwards(frame))) for n, frame in _threads().items()}
    # On a GPU backward runs in threads of autograd's, which Python has not started, while the main
    # one waits for them: a layer is nearer to what is waited for.
    in_exchange = sorted(
        (n in started, place.layer is None, n != main, n)
        for n, place in found.items()
        if place.waits
    )
    chosen = in_exchange[0][-1] if in_exchange else main
    return found.get(chosen or 0) or Place("an unknown place")


def stacks() -> dict[str, list[str]]:
    """The frames of each thread, the outermost first, for the flight record."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(number, f"thread {number}"): [
            f"{entry.filename}:{entry.lineno} {entry.name}"
            for entry in traceback.extract_stack(frame)
        ]
        for number, frame in _threads().items()
    }


def _threads() -> dict[int, FrameType]:
    ours = {t.ident for t in threading.enumerate() if t.name.startswith(OWN_THREADS)}
    return {n: frame for n, frame in sys._current_frames().items() if n not in ours}


def unfinished_on_nccl() -> list[dict[str, Any]]:
    """Collectives that NCCL has not finished, the oldest first, by torch's own flight recorder."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None or not torch.cuda.is_initialized():
        return []
    # Made by this process itself, in memory.
    entries = pickle.loads(dump()).get("entries", [])
    return [entry for entry in entries if entry.get("state") != "completed"]


def place_on_device(place: Place, unfinished: Sequence[Mapping[str, Any]]) -> Place:
    """The place of a process whose host waits for the device: in the oldest collective there."""
    if place.exchange or not unfinished:
        return place
    entry = unfinished[0]
    number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
    _, group = entry.get("process_group", ("", "?"))
    name = f"{entry.get('profiling_name')}, number {number} of the group {group!r}, on the device"
    return place._replace(exchange=name, waits=True)


def place_of_error(error: BaseException) -> Place:
    """Returns where an exception was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return place_of(frames[::-1])


def place_of(frames: Sequence[FrameType]) -> Place:
    """Returns what the frames of one thread say, the innermost first."""
    innermost = frames[0]
    exchange, waits_for = next(filter(None, map(_exchange, frames)), ("", ()))
    return Place(
        code=_code(innermost),
        layer=next((n for n in map(_layer, frames) if n is not None), None),
        direction=next(filter(None, map(_direction, frames)), ""),
        exchange=exchange,
        waits_for=waits_for,
        waits=bool(exchange) and any(_is(innermost, file) for file in _WAITING),
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _code(frame: FrameType) -> str:
    path = PurePath(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"


def _is(frame: FrameType, file: str, *functions: str) -> bool:
    is_there = file in PurePath(frame.f_code.co_filename).as_posix()
    return is_there and (not functions or frame.f_code.co_name in functions)


def _layer(frame: FrameType) -> int | None:
    """The number of the layer whose method or backward this frame runs."""
    if frame.f_code.co_name not in ("forward", "backward", "sharded_attention", "__call__"):
        return None
    held = frame.f_locals
    for name, attribute in (("self", "layer_idx"), ("module", "layer_idx"), ("ctx", "layer")):
        number = getattr(held.get(name), attribute, None)
        if isinstance(number, int):
            return number
    return None


def _direction(frame: FrameType) -> str:
    if _is(frame, "torch/autograd/graph.py") or _is(frame, "engine/autograd.py", "backward"):
        return "backward"
    if _is(frame, "torch/optim/"):
        return "the optimizer"
    if frame.f_code.co_name == "forward" and hasattr(frame.f_locals.get("self"), "parameters"):
        return "forward"
    return ""


def _exchange(frame: FrameType) -> tuple[str, tuple[int, ...]] | None:
    """(exchange in words, ranks it waits for) if this frame is in one."""
    held = frame.f_locals
    if _is(frame, "longctx_patch/engine/executor.py", "_walk"):
        return _of_plan(held)
    if _is(frame, "longctx_patch/engine/ulysses.py"):
        return "attention's exchange of heads", ()
    if _is(frame, "longctx_patch/transport/meeting.py", "meet"):
        return f"the meeting {held['meeting'].name}", _others(held["everyone"])
    if _is(frame, "torch/distributed/distributed_c10d.py"):
        return f"{_outermost_of_torch(frame)} of torch.distributed", ()
    if _is(frame, "torch/distributed/fsdp/"):
        return f"FSDP's {frame.f_code.co_name}", ()
    if _is(frame, "torch/autograd/graph.py", "_engine_run_backward") and _is_reduced():
        return "backward's own operations or the averaging of gradients", ()
    return None


def _of_plan(held: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    plan, rank, number = held["plan"], held["rank"], held.get("number")
    name = f"attention's exchange by the plan {plan.name!r}"
    if number is None:
        return name, ()
    messages = plan.rank_messages[rank]
    sources = {t.source for half in messages[number] for t in half.receives}
    text = f"{name}, its step {number + 1} of {len(messages)}"
    return text, _global(held["self"].transport, sorted(sources))


def _is_reduced() -> bool:
    """Says whether gradients are averaged over processes, as DDP does within backward."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _outermost_of_torch(frame: FrameType) -> str:
    """The function of torch.distributed that was called from outside of it."""
    name = frame.f_code.co_name
    for outer in _outwards(frame.f_back):
        if _is(outer, "torch/distributed/distributed_c10d.py"):
            name = outer.f_code.co_name
        elif not _is(outer, "torch/distributed/c10d_logger.py"):
            break
    return name


def _others(transport: Any) -> tuple[int, ...]:
    ranks = [rank for rank in range(transport.num_ranks) if rank != transport.group_rank]
    return _global(transport, ranks)


def _global(transport: Any, group_ranks: list[int]) -> tuple[int, ...]:
    """Ranks of the world, where the group is one of torch.distributed."""
    group = getattr(transport, "group", None)
    if group is None:
        return tuple(group_ranks)
    return tuple(dist.get_global_rank(group, rank) for rank in group_ranks)
