"""Measures how fast GPUs compute and copy, and links between them, and names the slow ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, nan

import torch

from longctx_patch.cli.diagnosis.gpus import Gpu, Gpus
from longctx_patch.cli.diagnosis.packages import Check, State
from longctx_patch.health.pace import TERA, Slow, slow_ones, time_products, time_work
from longctx_patch.planner.machines import machine_of

GIGA = 10**9
_SIZE, _COPIED_BYTES = 8192, 2**29
_MOST_LINKS = 6
"""So many slow links are named."""


@dataclass(frozen=True)
class Speeds:
    """Holds what was measured; NaN where a GPU has no memory left for it."""

    products: Sequence[float]
    """FLOP/s of each GPU, of bfloat16 matrix products."""
    copies: Sequence[float]
    """Bytes per second of each GPU's memory, read and written."""
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Bytes per second from the first GPU of a pair to the second."""


def measure_speeds(num_gpus: int) -> Speeds:
    """Measure one GPU after the other: half a second each, and 1 GiB of its memory."""
    gpus = range(num_gpus)
    return Speeds(
        products=[_where_there_is_room(_products, gpu) for gpu in gpus],
        copies=[_where_there_is_room(_copies, gpu, gpu) for gpu in gpus],
        links={(i, j): _where_there_is_room(_copies, i, j) for i in gpus for j in gpus if i != j},
    )


def _where_there_is_room(measure: Callable[..., float], *gpus: int) -> float:
    try:
        return measure(*gpus)
    except torch.OutOfMemoryError:
        return nan
    finally:
        torch.cuda.empty_cache()


def _products(gpu: int) -> float:
    return time_products(torch.device("cuda", gpu), _SIZE, warm=60, repeats=9).rate()


def _copies(source: int, target: int) -> float:
    """Within a GPU each byte is read and written there; between two it crosses the link once."""
    sent = torch.zeros(_COPIED_BYTES // 4, device=torch.device("cuda", source))
    arrived = torch.empty_like(sent, device=torch.device("cuda", target))
    amount = _COPIED_BYTES * (2 if source == target else 1)
    with torch.cuda.device(source):  # torch copies between GPUs in the source's stream
        work: Callable[[], object] = partial(arrived.copy_, sent, non_blocking=True)
        if source == target:  # an element-wise pass, as the kinds' known rates are of such
            work = partial(torch.neg, sent, out=arrived)
        return time_work(work, amount, warm=3, together=2, repeats=9).rate()


def check_gpu_speed(found: Gpus, speeds: Speeds) -> Check:
    """Checks whether each GPU is as fast as those of its kind, and as its kind is known to be."""
    if not found.seen:
        return Check("gpu speed", "skipped", "no GPU")
    said, figures, slow = list[str](), dict[str, float](), list[Slow]()
    for what, unit, scale, rates, known in (
        ("matrix products", "TFLOP/s", TERA, speeds.products, "matmul_flops"),
        ("copies", "GB/s", GIGA, speeds.copies, "copy_bandwidth"),
    ):
        said.append(f"{what} {_span(rates, scale)} {unit}")
        name = f"{what} {unit}".lower().replace(" ", "_").replace("/s", "_per_s")
        figures |= {f"gpu_{at}_{name}": r / scale for at, r in enumerate(rates) if isfinite(r)}
        for each in _slow_of_kinds(found.seen, rates, known):
            slow.append(each)
            gpu = found.seen[each.index]
            called = ", ".join(filter(None, (gpu.name, gpu.uuid, gpu.pci)))
            said.append(f"GPU {each.index} ({called}): {what} {_compared(each, unit, scale)}")
    full = [str(number) for number, rate in enumerate(speeds.copies) if not isfinite(rate)]
    if full:
        said.append(f"GPU {', '.join(full)} has no memory free to be measured")
    if not slow:
        return Check("gpu speed", "warning" if full else "ok", "; ".join(said), figures=figures)
    which = [gpu.pci for gpu in (found.seen[each.index] for each in slow) if gpu.pci]
    fix = f"nvidia-smi -q {f'-i {which[0]} ' if which else ''}-d PERFORMANCE,CLOCK,POWER,ECC,PIDS"
    fix += "  # says why; export CUDA_VISIBLE_DEVICES=... leaves it out"
    return Check("gpu speed", _state(slow), "; ".join(said), fix, figures)


def check_link_speed(found: Gpus, speeds: Speeds) -> Check:
    """Checks whether each link of two GPUs is as fast as others of its kind, or known to be."""
    if len(found.seen) < 2:
        return Check("link speed", "skipped", "fewer than two GPUs")
    kinds: dict[str, list[tuple[int, int]]] = {}
    for pair in speeds.links:
        kinds.setdefault((found.links or {}).get(pair, "of a kind unknown"), []).append(pair)
    said, slow = [], list[tuple[tuple[int, int], Slow]]()
    for kind, pairs in kinds.items():
        rates = [speeds.links[pair] for pair in pairs]
        said.append(f"{len(pairs)} ways {kind}: {_span(rates, GIGA)} GB/s")
        known = _known_link(found) if kind.startswith("NV") else nan
        slow += [
            (pairs[each.index], each) for each in slow_ones(rates, known, "NVLink of such GPUs")
        ]
    slow.sort(key=lambda item: item[1].share)
    said += [
        f"GPU {i} to GPU {j}: {_compared(each, 'GB/s', GIGA)}"
        for (i, j), each in slow[:_MOST_LINKS]
    ]
    said += [f"and {len(slow) - _MOST_LINKS} more"] if len(slow) > _MOST_LINKS else []
    figures = {
        f"gpu_{i}_to_{j}_gb_per_s": rate / GIGA
        for (i, j), rate in speeds.links.items()
        if isfinite(rate)
    }
    if not slow:
        return Check("link speed", "ok", "; ".join(said), figures=figures)
    fix = "nvidia-smi nvlink -s && nvidia-smi topo -m  # links that are down, or not NVLink"
    return Check("link speed", _state([each for _, each in slow]), "; ".join(said), fix, figures)


def _known_link(found: Gpus) -> float:
    """Bytes per second of NVLink between these GPUs; NaN where one of them is not known."""
    machines = [machine_of(gpu.name, gpu.total_bytes) for gpu in found.seen]
    return min(m.intra_node.bandwidth if m and m.is_measured else nan for m in machines)


def _slow_of_kinds(gpus: Sequence[Gpu], rates: Sequence[float], known: str) -> Iterator[Slow]:
    """The slow ones, among GPUs of one name; `known`: the field of `Hardware` to hold them to."""
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        numbers = [number for number, gpu in enumerate(gpus) if gpu.name == name]
        machine = machine_of(name, gpus[numbers[0]].total_bytes)
        is_known = machine is not None and machine.is_measured
        rate = float(getattr(machine, known, nan)) if is_known else nan
        for each in slow_ones([rates[number] for number in numbers], rate, f"an {name}"):
            yield replace(each, index=numbers[each.index])


def _compared(slow: Slow, unit: str, scale: float) -> str:
    rate, usual = (f"{value / scale:,.0f}" for value in (slow.rate, slow.usual))
    return f"{rate} {unit}, {slow.share:.0%} of {usual}, {slow.by}"


def _span(rates: Iterable[float], scale: float) -> str:
    measured = sorted(rate for rate in rates if isfinite(rate))
    shown = dict.fromkeys(f"{rate / scale:,.0f}" for rate in (measured[:1] + measured[-1:]))
    return " to ".join(shown) or "not measured"


def _state(slow: Iterable[Slow]) -> State:
    return "failed" if any(each.is_failure for each in slow) else "warning"
