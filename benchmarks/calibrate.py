"""Measure what a cost model of distributed attention needs to know of a machine.

    python benchmarks/calibrate.py --out rates.json                        # one GPU, or a CPU
    torchrun --nproc_per_node 4 benchmarks/calibrate.py --out rates.json   # also the links

Attention kernels, passes over memory, messages, and the host; bfloat16 on CUDA, float32 on CPU.
Each time is the median over calls, on the slowest rank. Legend: B batch (1), L query rows, M keys,
H query heads, G key-value heads, D head dim.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
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
    make_parser,
    num_processes,
    slowest,
    start,
    write_json,
)
from numpy.typing import NDArray
from torch import Tensor

from longctx_patch import LongContextConfig, make_sequence_group
from longctx_patch.engine.accumulate import RowSum, SoftmaxMerge
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
MESSAGE_BYTES = tuple(2**exponent for exponent in range(16, 29, 2))  # 64 KiB to 256 MiB
QUICK_MESSAGE_BYTES = MESSAGE_BYTES[:3]
OVERLAP_ROWS, OVERLAP_BYTES = 8192, 2**26
FILLER_BYTES = 2**31  # clearing them takes about 0.7 ms: longer than the host needs for a call
SMALLEST_FIXED_S = 1e-7
HALF_TOKENS = (0.0, *np.geomspace(1.0, 65536.0, 321).tolist())  # candidates of the fit

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ColdClock(Clock):
    """Device times are of single calls, not of one straight after the other."""

    filler: Tensor
    """On CUDA, clearing it keeps the device busy while the host enqueues a call, so that device
    times hold no host time; and it leaves a cold L2 cache."""

    def device_time(self, call: Callable[[], object]) -> Timing:
        """From when the device could begin until it is done."""
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


class Line(NamedTuple):
    """seconds = fixed_s + amount / per_s."""

    fixed_s: float
    per_s: float
    largest_error: float
    """Relative to the measured time."""
    squared_errors: float


def fit_line(amounts: Floats, seconds: Floats) -> Line:
    """Least squares of the relative errors; both numbers positive, for nothing is free."""
    scale = amounts.max()
    columns = np.stack([np.ones_like(seconds), amounts / scale], 1) / seconds[:, None]
    fixed_s, slope_s = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
    if min(fixed_s, slope_s) < SMALLEST_FIXED_S:
        # The best positive fit has the fixed part at its lower edge: slope_s alone is left.
        fixed_s = SMALLEST_FIXED_S
        rest = 1 - fixed_s * columns[:, 0]
        slope_s = (columns[:, 1] @ rest) / (columns[:, 1] @ columns[:, 1])
    errors = np.abs(columns @ (fixed_s, slope_s) - 1)
    return Line(float(fixed_s), float(scale / slope_s), float(errors.max()), float(errors @ errors))


class KernelCall(NamedTuple):
    """A block to compute; a causal one is square."""

    rows: int
    keys: int
    causal: bool
    heads: int
    kv_heads: int

    def flops(self, direction: str) -> int:
        """Two matrix products per pair forward, five backward (FlashAttention-2)."""
        area = self.rows * (self.rows + 1) // 2 if self.causal else self.rows * self.keys
        return (4 if direction == "forward" else 10) * area * self.heads * HEAD_DIM


def kernel_calls(sizes: Sequence[int]) -> list[KernelCall]:
    """Causal and full squares of all sizes; of every second size also both half rectangles."""
    blocks = [(size, size, causal) for size in sizes for causal in (True, False)]
    blocks += [(size, size // 2, False) for size in sizes[::2]]
    blocks += [(size // 2, size, False) for size in sizes[::2]]
    return [KernelCall(*block, *heads) for block, heads in product(blocks, HEADS)]


def prepared(
    kernel: Kernel, block: KernelCall, clock: Clock
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """The block's calls by direction, with random inputs."""
    rows, keys, causal, heads, kv_heads = block
    q, dout = normal((2, 1, rows, heads, HEAD_DIM), clock.device)
    k, v = normal((2, 1, keys, kv_heads, HEAD_DIM), clock.device)
    rule = CAUSAL_WINDOW if causal else FULL_WINDOW
    how = (Segments((rows,), (keys,), rule), Score(HEAD_DIM**-0.5))
    forward = partial(kernel.forward, q, k, v, *how)
    backward = partial(kernel.backward, BackwardInputs(dout, q, k, v, *forward()), *how)
    return {"forward": forward, "backward": backward}


def measure_kernels(kernel: Kernel, sizes: Sequence[int], clock: Clock) -> list[Row]:
    rows = []
    for block in kernel_calls(sizes):
        for direction, call in prepared(kernel, block, clock).items():
            flops, times = block.flops(direction), clock.device_time(call)._asdict()
            row = {"direction": direction, **block._asdict(), "head_dim": HEAD_DIM, "flops": flops}
            rows.append(row | times | {"tflops_per_s": flops / times["seconds"] * 1e-12})
    return rows


def fit_kernels(rows: Sequence[Row]) -> list[Row]:
    """A fit for each direction, causal and full, over all sizes and numbers of heads."""
    fits = []
    for direction, causal in product(("forward", "backward"), (True, False)):
        chosen = [r for r in rows if (r["direction"], r["causal"]) == (direction, causal)]
        columns = ([row[name] for row in chosen] for name in ("flops", "keys", "seconds"))
        fit = fit_kernel(*(np.array(column, dtype=np.float64) for column in columns))
        fits.append({"direction": direction, "causal": causal, **fit})
    return fits


def fit_kernel(flops: Floats, keys: Floats, seconds: Floats) -> Row:
    """seconds = fixed_s + flops / peak_flops * (1 + half_tokens / keys).

    For a given half_tokens that is a line, so half_tokens is tried over a grid.
    """
    lines = [(fit_line(flops * (1 + half / keys), seconds), half) for half in HALF_TOKENS]
    line, half_tokens = min(lines, key=lambda pair: pair[0].squared_errors)
    return {
        "fixed_s": line.fixed_s,
        "peak_flops": line.per_s,
        "half_tokens": half_tokens,
        "largest_error": line.largest_error,
    }


class BytesCall(NamedTuple):
    """A call whose time follows `bytes`: read and written by it, or sent by each rank."""

    kind: str
    bytes: int
    call: Callable[[], object]


def measure_bytes(calls: Iterable[BytesCall], clock: Clock) -> list[Row]:
    """A lazy `calls` makes its tensors one size at a time."""
    rows = []
    for kind, num_bytes, call in calls:
        times = clock.device_time(call)._asdict()
        rate = {"gigabytes_per_s": num_bytes / times["seconds"] * 1e-9}
        rows.append({"kind": kind, "bytes": num_bytes} | times | rate)
    return rows


def fit_bytes(rows: Sequence[Row]) -> list[Row]:
    """For each kind: seconds = latency_s + bytes / bandwidth."""
    fits = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        points = [(row["bytes"], row["seconds"]) for row in rows if row["kind"] == kind]
        line = fit_line(*np.array(points, dtype=np.float64).T)
        fit = {"latency_s": line.fixed_s, "bandwidth": line.per_s}
        fits.append({"kind": kind, **fit, "largest_error": line.largest_error})
    return fits


def memory_passes(sizes: Sequence[int], clock: Clock) -> Iterator[BytesCall]:
    """Sums of partial results, and packing; bytes are those of one ideal pass.

    For each element a sum reads the part in the model's dtype, reads the float32 total and writes
    it (bfloat16: 2 + 4 + 4); packing reads and writes the model's dtype. The lse is left out: it is
    a 1 / D of the rest.
    """
    heads, _ = HEADS[0]
    for rows in sizes:
        shape, every = (1, rows, heads, HEAD_DIM), Interval(0, rows)
        part = normal(shape, clock.device)
        lse_BHL = torch.zeros(1, heads, rows, device=clock.device)
        spec = TensorSpec(shape, part.dtype)
        merge, total = SoftmaxMerge(spec, clock.device), RowSum(spec, clock.device)
        merge.add(every, part, lse_BHL)  # the first part is adopted; later ones are added to it
        total.add(every, part)
        summed_bytes = part.numel() * (part.itemsize + 4 + 4)
        yield BytesCall("softmax_merge", summed_bytes, partial(merge.add, every, part, lse_BHL))
        yield BytesCall("row_sum", summed_bytes, partial(total.add, every, part))
        yield BytesCall("pack", 2 * part.nbytes, partial(Packet.pack, [part]))


def links(transport: Transport, sizes: Sequence[int], clock: Clock) -> Iterator[BytesCall]:
    """Ring hops, and both ways to send each other rank a part of its own."""
    num_ranks = transport.num_ranks
    for num_bytes in sizes:
        post = ring_hop(transport, num_bytes, clock.device)
        yield BytesCall("ring_hop", num_bytes, waited(post))
        part = num_bytes // num_ranks
        sent, sizes_bytes = part * (num_ranks - 1), [part] * num_ranks
        send, receive = random_bytes((2, part * num_ranks), clock.device)
        all_to_all = partial(transport.all_to_all, send, sizes_bytes, receive, sizes_bytes)
        yield BytesCall("all_to_all", sent, all_to_all)
        post = to_all_others(transport, send.view(num_ranks, part), receive.view(num_ranks, part))
        yield BytesCall("to_all_others", sent, waited(post))


def ring_hop(transport: Transport, num_bytes: int, device: torch.device) -> Callable[[], Pending]:
    """An exchange that passes a message on to the next rank."""
    rank, num_ranks = transport.group_rank, transport.num_ranks
    send, receive = random_bytes((2, num_bytes), device)
    sends = [Message((rank + 1) % num_ranks, send)]
    receives = [Message((rank - 1) % num_ranks, receive)]
    return partial(transport.exchange, sends, receives)


def waited(post: Callable[[], Pending]) -> Callable[[], None]:
    """The exchange with its wait."""
    return lambda: post().wait()


def to_all_others(transport: Transport, send: Tensor, receive: Tensor) -> Callable[[], Pending]:
    """One exchange in which each rank sends row `i` of `send` to rank `i`."""
    others = [rank for rank in range(transport.num_ranks) if rank != transport.group_rank]
    sends = [Message(rank, send[rank]) for rank in others]
    receives = [Message(rank, receive[rank]) for rank in others]
    return partial(transport.exchange, sends, receives)


def measure_overlap(
    kernel: Kernel, transport: Transport, rows: int, num_bytes: int, clock: Clock
) -> Row:
    """How much of a ring hop under a full forward kernel is not hidden: 0 all is, 1 nothing."""
    post = ring_hop(transport, num_bytes, clock.device)
    attend = prepared(kernel, KernelCall(rows, rows, False, *HEADS[0]), clock)["forward"]

    def both() -> None:
        pending = post()
        attend()
        pending.wait()

    kernel_s = clock.device_time(attend).seconds
    hop_s = clock.device_time(waited(post)).seconds
    both_s = clock.device_time(both).seconds
    return {
        "rows": rows,
        "bytes": num_bytes,
        "kernel_s": kernel_s,
        "hop_s": hop_s,
        "both_s": both_s,
        "overlap_slowdown": (both_s - kernel_s) / min(kernel_s, hop_s),
    }


def measure_host(
    kernel: Kernel, transport: Transport | None, rows: int, num_bytes: int, clock: Clock
) -> dict[str, Row]:
    """Host time of a kernel call by direction, of sums and packing, of an exchange and its wait."""
    calls: dict[str, Callable[[], object]] = {}
    calls |= prepared(kernel, KernelCall(rows, rows, True, *HEADS[0]), clock)
    calls |= {kind: call for kind, _, call in memory_passes([rows], clock)}
    if transport is not None:
        calls["exchange"] = waited(ring_hop(transport, num_bytes, clock.device))
    times = {}
    for name, call in calls.items():
        clock.warm_up(call)
        times[name] = clock.host_time(call)._asdict()
    return times


def normal(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype_on(device), device=device)


def random_bytes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, device=device)


def measure(sizes: Sequence[int], messages: Sequence[int], clock: Clock) -> Row:
    """Everything, as JSON. Collective."""
    device = clock.device
    kernel = choose_kernel("auto", KernelRequest(device.type, dtype_on(device), HEAD_DIM))
    num_ranks = num_processes()
    group = make_sequence_group(LongContextConfig(ring_degree=num_ranks))
    transport = group.ring if num_ranks > 1 else None
    kernels = measure_kernels(kernel, sizes, clock)
    memory = measure_bytes(memory_passes(sizes, clock), clock)
    sent, overlap = [], None
    if transport is not None:
        sent = measure_bytes(links(transport, messages, clock), clock)
        rows, num_bytes = min(OVERLAP_ROWS, max(sizes)), min(OVERLAP_BYTES, max(messages))
        overlap = measure_overlap(kernel, transport, rows, num_bytes, clock)
    host = measure_host(kernel, transport, min(sizes), min(messages), clock)
    group.close()
    return {
        "machine": {
            **machine(device),
            "num_processes": num_ranks,
            "kernel": kernel.name,
        },
        "kernels": kernels,
        "kernel_fits": fit_kernels(kernels),
        "memory": memory,
        "memory_fits": fit_bytes(memory),
        "links": sent,
        "link_fits": fit_bytes(sent),
        "overlap": overlap,
        "host": host,
    }


def print_report(report: Row) -> None:
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    for name, section in report.items():
        if name == "machine" or not section:
            continue
        if name == "host":
            section = [{"call": call, **times} for call, times in section.items()]
        print_table(name, section if isinstance(section, list) else [section])


def print_table(title: str, rows: Sequence[Row]) -> None:
    def text(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [list(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def make_clock(device: torch.device, iterations: int) -> ColdClock:
    num_bytes = FILLER_BYTES if device.type == "cuda" else 0
    return ColdClock(device, iterations, torch.empty(num_bytes, dtype=torch.uint8, device=device))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", help=f"rows of a block (default {SIZES})")
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
    clock = make_clock(start(), arguments.iterations)
    messages = QUICK_MESSAGE_BYTES if arguments.quick else MESSAGE_BYTES
    report = measure(sorted(sizes), messages, clock)
    if is_first_rank():
        print_report(report)
        write_json(report, arguments.out)
    finish()


if __name__ == "__main__":
    main()
