"""Measure what the cost model of distributed attention needs to know of a machine.

    python benchmarks/calibrate.py --out rates.json                        # one GPU, or a CPU
    torchrun --nproc_per_node 4 benchmarks/calibrate.py --out rates.json   # also the links

Attention kernels, passes over memory, messages, and the host; bfloat16 on CUDA, float32 on CPU.
Each time is the median over calls, on the slowest rank. Legend: B batch (1), L query rows, M keys,
H query heads, G key-value heads, D head dim.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from measure import (
    Clock,
    Row,
    Timing,
    dtype_on,
    finish,
    is_first_rank,
    machine,
    num_processes,
    slowest,
    start,
)
from numpy.typing import NDArray
from torch import Tensor

from longctx_patch import LongContextConfig, make_sequence_group
from longctx_patch.engine.accumulate import RowSum, SoftmaxMerge, out_specs
from longctx_patch.kernels import (
    BackwardInputs,
    Kernel,
    KernelRequest,
    Score,
    Segments,
    choose_kernel,
)
from longctx_patch.kernels.base import CAUSAL_WINDOW, FULL_WINDOW
from longctx_patch.sequence.layout import Interval
from longctx_patch.transport import Message, Packet, Pending, TensorSpec, Transport

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
QUICK_SIZES = (64, 128, 256)
HEADS = ((32, 8), (8, 2))
HEAD_DIM = 128
"""The head size that passes over memory have, and kernels unless `--head-dim` says otherwise."""
MESSAGE_BYTES = tuple(2**exponent for exponent in range(16, 29, 2))  # 64 KiB to 256 MiB
QUICK_MESSAGE_BYTES = MESSAGE_BYTES[:3]
OVERLAP_ROWS, OVERLAP_BYTES = 8192, 2**26
FILLER_BYTES = 2**31  # clearing them takes about 0.7 ms: longer than the host needs for a call

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ColdClock(Clock):
    """Times single calls on the device, not calls straight after each other."""

    filler: Tensor
    """On CUDA, clearing it keeps the device busy while the host enqueues a call, so that device
    times hold no host time; and it leaves a cold L2 cache."""

    def device_time(self, call: Callable[[], object]) -> Timing:
        """Time each call from when the device is free to begin it until it is done."""
        self.warm_up(call)
        if not self.on_cuda:
            return self.host_time(call)
        events = [self._events(call) for _ in range(self.iterations)]
        torch.cuda.synchronize(self.device)
        return slowest([start.elapsed_time(stop) * 1e-3 for start, stop in events])

    def _events(self, call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.filler.zero_()
        self.line_up()
        start.record()
        call()
        stop.record()
        return start, stop


class Fit(NamedTuple):
    """The line through measured times."""

    slopes: Mapping[str, float]
    """Seconds by unit of each amount, none of them negative."""
    largest_error: float
    """Relative to the measured time."""


def fit(amounts: Mapping[str, Floats], seconds: Floats) -> Fit:
    """Least squares of the relative errors: the best over sets of amounts without slopes < 0."""
    best, least = Fit({}, np.inf), np.inf
    for names in (set_ for n in range(len(amounts)) for set_ in combinations(amounts, n + 1)):
        scales = [amounts[name].max() for name in names]
        columns = np.stack([amounts[n] / m for n, m in zip(names, scales, strict=True)], 1)
        columns /= seconds[:, None]
        slopes = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
        errors = np.abs(columns @ slopes - 1)
        if slopes.min() >= 0 and errors @ errors < least:
            found = dict.fromkeys(amounts, 0.0)
            found |= {n: float(s / m) for n, s, m in zip(names, slopes, scales, strict=True)}
            best, least = Fit(found, float(errors.max())), float(errors @ errors)
    return best


class KernelCall(NamedTuple):
    """A block to compute; a causal one is square."""

    rows: int
    keys: int
    causal: bool
    heads: int
    kv_heads: int
    head_dim: int

    def flops(self, direction: str) -> int:
        """FLOPs of two matrix products per pair forward, five backward (FlashAttention-2)."""
        area = self.rows * (self.rows + 1) // 2 if self.causal else self.rows * self.keys
        return (4 if direction == "forward" else 10) * area * self.heads * self.head_dim


def kernel_calls(sizes: Sequence[int], head_dim: int) -> list[KernelCall]:
    """Causal and full squares of all sizes; for every second size also both half rectangles."""
    blocks = [(size, size, causal) for size in sizes for causal in (True, False)]
    blocks += [(size, size // 2, False) for size in sizes[::2]]
    blocks += [(size // 2, size, False) for size in sizes[::2]]
    return [KernelCall(*block, *heads, head_dim) for block, heads in product(blocks, HEADS)]


def prepared(
    kernel: Kernel, block: KernelCall, clock: Clock
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """The block's calls by direction, with random inputs."""
    rows, keys, causal, heads, kv_heads, head_dim = block
    q, dout = normal((2, 1, rows, heads, head_dim), clock.device)
    k, v = normal((2, 1, keys, kv_heads, head_dim), clock.device)
    rule = CAUSAL_WINDOW if causal else FULL_WINDOW
    how = (Segments((rows,), (keys,), rule), Score(head_dim**-0.5))
    forward = partial(kernel.forward, q, k, v, *how)
    backward = partial(kernel.backward, BackwardInputs(dout, q, k, v, *forward()), *how)
    return {"forward": forward, "backward": backward}


def measure_kernels(kernel: Kernel, sizes: Sequence[int], head_dim: int, clock: Clock) -> list[Row]:
    rows = []
    for block in kernel_calls(sizes, head_dim):
        for direction, call in prepared(kernel, block, clock).items():
            flops, times = block.flops(direction), clock.device_time(call)._asdict()
            rows.append({"direction": direction, **block._asdict(), "flops": flops} | times)
    return rows


def fit_kernels(rows: Sequence[Row]) -> dict[str, Row]:
    """`KernelRate` of each direction, causal and full, over all sizes and numbers of heads."""
    fits = {}
    for direction, causal in product(("forward", "backward"), (False, True)):
        chosen = [r for r in rows if (r["direction"], r["causal"]) == (direction, causal)]
        columns = ([row[name] for row in chosen] for name in ("flops", "keys", "seconds"))
        rate = fit_kernel(*(np.array(column, dtype=np.float64) for column in columns))
        fits[f"{direction}_{'causal' if causal else 'full'}"] = rate
    return fits


def fit_kernel(flops: Floats, keys: Floats, seconds: Floats) -> Row:
    """seconds = fixed_s + flops / peak_flops * (1 + half_tokens / keys)."""
    amounts = {"call": np.ones_like(seconds), "flops": flops, "by keys": flops / keys}
    slopes, error = fit(amounts, seconds)
    return {
        "peak_flops": 1 / slopes["flops"] if slopes["flops"] else np.inf,
        "half_tokens": slopes["by keys"] / slopes["flops"] if slopes["flops"] else np.inf,
        "fixed_s": slopes["call"],
        "largest_error": error,
    }


class BytesCall(NamedTuple):
    """A call whose time depends on `bytes`: those it reads and writes, or those each rank sends."""

    kind: str
    bytes: int
    call: Callable[[], object]


def measure_bytes(calls: Iterable[BytesCall], clock: Clock) -> list[Row]:
    """Time each call. A lazy `calls` makes its tensors one size at a time."""
    return [
        {"kind": kind, "bytes": num_bytes} | clock.device_time(call)._asdict()
        for kind, num_bytes, call in calls
    ]


def fit_bytes(rows: Sequence[Row]) -> dict[str, Row]:
    """`Link` of each kind: seconds = latency_s + bytes / bandwidth."""
    fits = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        points = [(row["bytes"], row["seconds"]) for row in rows if row["kind"] == kind]
        num_bytes, seconds = np.array(points, dtype=np.float64).T
        slopes, error = fit({"call": np.ones_like(seconds), "bytes": num_bytes}, seconds)
        bandwidth = 1 / slopes["bytes"] if slopes["bytes"] else np.inf
        line = {"bandwidth": bandwidth, "latency_s": slopes["call"]}
        fits[kind] = line | {"largest_error": error}
    return fits


def memory_passes(sizes: Sequence[int], clock: Clock) -> Iterator[BytesCall]:
    """Sums of partial results, and packing; bytes are those of one ideal pass.

    For each element a sum reads the part in the model's dtype, reads the float32 total and writes
    it (bfloat16: 2 + 4 + 4); packing reads and writes the model's dtype. The lse is left out, since
    it is 1 / D of the rest.
    """
    heads, _ = HEADS[0]
    for rows in sizes:
        shape, every = (1, rows, heads, HEAD_DIM), Interval(0, rows)
        part = normal(shape, clock.device)
        lse_BLH = torch.zeros(1, heads, rows, device=clock.device).transpose(1, 2)
        spec = TensorSpec(shape, part.dtype)
        merge = SoftmaxMerge(out_specs(spec), clock.device)
        total = RowSum([spec], clock.device)
        out = lse_BLH, part
        merge.add(every, out)  # the first part is adopted; later ones are added to it
        total.add(every, (part,))
        summed_bytes = part.numel() * (part.itemsize + 4 + 4)
        yield BytesCall("softmax_merge", summed_bytes, partial(merge.add, every, out))
        yield BytesCall("row_sum", summed_bytes, partial(total.add, every, (part,)))
        yield BytesCall("pack", 2 * part.nbytes, partial(Packet.pack, [part]))


def ring_hop(transport: Transport, num_bytes: int, device: torch.device) -> Callable[[], Pending]:
    """An exchange that passes a message on to the next rank."""
    rank, num_ranks = transport.group_rank, transport.num_ranks
    send, receive = torch.randint(256, (2, num_bytes), dtype=torch.uint8, device=device)
    sends = [Message((rank + 1) % num_ranks, send)]
    receives = [Message((rank - 1) % num_ranks, receive)]
    return partial(transport.exchange, sends, receives)


def waited(post: Callable[[], Pending]) -> Callable[[], None]:
    """A call that posts the exchange and waits for it."""
    return lambda: post().wait()


def measure_overlap(
    kernel: Kernel, transport: Transport, rows: int, num_bytes: int, clock: Clock
) -> Row:
    """The share of a ring hop's time that a full forward kernel beside it does not hide."""
    post = ring_hop(transport, num_bytes, clock.device)
    attend = prepared(kernel, KernelCall(rows, rows, False, *HEADS[0], HEAD_DIM), clock)["forward"]

    def both() -> None:
        pending = post()
        attend()
        pending.wait()

    kernel_s, hop_s, both_s = (
        clock.device_time(call).seconds for call in (attend, waited(post), both)
    )
    slowdown = (both_s - kernel_s) / min(kernel_s, hop_s)
    return {"kernel_s": kernel_s, "hop_s": hop_s, "both_s": both_s, "overlap_slowdown": slowdown}


def measure_host(
    kernel: Kernel, transport: Transport | None, rows: int, num_bytes: int, clock: Clock
) -> dict[str, float]:
    """Host time of a kernel call by direction, of sums and packing, of an exchange and its wait."""
    calls: dict[str, Callable[[], object]] = {}
    calls |= prepared(kernel, KernelCall(rows, rows, True, *HEADS[0], HEAD_DIM), clock)
    calls |= {kind: call for kind, _, call in memory_passes([rows], clock)}
    if transport is not None:
        calls["exchange"] = waited(ring_hop(transport, num_bytes, clock.device))
    for call in calls.values():
        clock.warm_up(call)
    return {name: clock.host_time(call).seconds for name, call in calls.items()}


def normal(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype_on(device), device=device)


def measure(
    sizes: Sequence[int], messages: Sequence[int], clock: Clock, head_dim: int = HEAD_DIM
) -> Row:
    """Everything, as JSON: what was measured, and the figures of a `Hardware`. Collective."""
    device, num_ranks = clock.device, num_processes()
    kernel = choose_kernel("auto", KernelRequest(device.type, dtype_on(device), head_dim))
    group = make_sequence_group(LongContextConfig(ring_degree=num_ranks))
    transport = group.ring if num_ranks > 1 else None
    kernels = measure_kernels(kernel, sizes, head_dim, clock)
    memory = measure_bytes(memory_passes(sizes, clock), clock)
    sent, overlap = [], None
    if transport is not None:
        hops = ((size, waited(ring_hop(transport, size, device))) for size in messages)
        sent = measure_bytes((BytesCall("ring_hop", *hop) for hop in hops), clock)
        rows, num_bytes = min(OVERLAP_ROWS, max(sizes)), min(OVERLAP_BYTES, max(messages))
        overlap = measure_overlap(kernel, transport, rows, num_bytes, clock)
    host = measure_host(kernel, transport, min(sizes), min(messages), clock)
    group.close()
    return {
        "machine": {
            **machine(device),
            "num_processes": num_ranks,
            "kernel": kernel.name,
            "head_dim": head_dim,
        },
        "measured": {"kernels": kernels, "memory": memory, "links": sent},
        "kernels": fit_kernels(kernels),
        "memory": fit_bytes(memory),
        "links": fit_bytes(sent),
        "overlap": overlap,
        "host_s": host,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--iterations", type=int, default=10, help="timed calls (default 10)")
    parser.add_argument("--sizes", type=int, nargs="+", help=f"rows of a block (default {SIZES})")
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM, help=f"of kernels ({HEAD_DIM})")
    parser.add_argument("--quick", action="store_true", help="small blocks and messages only")
    arguments = parser.parse_args()
    sizes = arguments.sizes or (QUICK_SIZES if arguments.quick else SIZES)
    if min(sizes) < 2 or len(set(sizes)) < 2:
        parser.error(
            f"--sizes {sizes}: a line is fitted. Give two sizes or more, of 2 rows or more."
        )
    if arguments.iterations < 1:
        parser.error(f"--iterations {arguments.iterations}: time 1 call or more, better 10.")
    torch.manual_seed(0)
    device = start()
    num_bytes = FILLER_BYTES if device.type == "cuda" else 0
    filler = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    clock = ColdClock(device, arguments.iterations, filler)
    messages = QUICK_MESSAGE_BYTES if arguments.quick else MESSAGE_BYTES
    report = measure(sorted(sizes), messages, clock, arguments.head_dim)
    if is_first_rank():
        print(json.dumps(report | {"measured": f"in {arguments.out}"}, indent=1))
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    finish()


if __name__ == "__main__":
    main()
