"""Time one recurrent layer's recurrence over ranks that share a row, by each way to share it.

    torchrun --nproc_per_node 2 benchmarks/recurrence_shared.py --out results/ --tokens 131072

`states`: this project's chain, maps handed on; `heads`: this project's exchange of heads; `fla`:
flash-linear-attention's own context parallelism (`cp_context`), where that package is installed.
All over contiguous shards of one document, with the same kernels. Before a way is timed, its output
and gradients over a short row have to be those of one rank with the whole row, within a few times
the rounding of the dtype. Times are of a forward with its backward, or of a forward alone, on the
slowest rank, with ranks lined up before each call. Kernels compile for minutes at first: `--tokens`
without a number only checks, so that several ways can be compiled side by side before one is timed.
Writes recurrence_shared.jsonl and .md into --out.
"""

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from measure import Clock, Row, Timing, dtype_on, everyone, finish, is_first_rank, machine, start
from recurrence import LAYERS, Layer, make_recurrence
from report import Column, heading, number, spread, table, write_lines
from torch import Tensor

from longctx_patch.engine.chain.chain_run import ChainRun, checked_chain
from longctx_patch.engine.chain.delta_rule import DeltaRule
from longctx_patch.engine.chain.recurrence import Recurrence, run_recurrence
from longctx_patch.engine.recurrent_heads import checked_heads, run_over_heads
from longctx_patch.engine.ulysses import Resharder
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval, contiguous
from longctx_patch.transport import Transport
from longctx_patch.transport.process_group import ProcessGroupTransport
from longctx_patch.transport.solo import SoloTransport

CHECK_TOKENS = 512
"""Of each rank's shard in the check."""
TOLERANCE = {torch.bfloat16: 4 * 2**-8, torch.float32: 1e-4}

Run = Callable[[Recurrence], Tensor]
"""From a rank's shard of a layer to its output. Collective."""


def world_transport(device: torch.device) -> Transport:
    world = dist.group.WORLD
    assert world is not None
    return ProcessGroupTransport(world, device)


def by_states(num_tokens: int, device: torch.device) -> Run:
    world = dist.get_world_size()
    chain = checked_chain(contiguous(num_tokens, world), Documents.one(num_tokens))
    transport = world_transport(device)
    return lambda recurrence: run_recurrence(ChainRun(chain, transport), recurrence)


def by_heads(num_tokens: int, device: torch.device) -> Run:
    world = dist.get_world_size()
    layout, whole = contiguous(num_tokens, world), contiguous(num_tokens, 1)
    chain = checked_chain(whole, Documents.one(num_tokens))
    transport = world_transport(device)

    def run(recurrence: Recurrence) -> Tensor:
        shape = recurrence.shape
        split = checked_heads(shape.num_heads, shape.num_groups, layout, whole)
        ring = ChainRun(chain, SoloTransport())
        out, _ = run_over_heads(ring, Resharder(transport, split, layout.sizes), recurrence)
        return out

    return run


def by_fla(num_tokens: int, device: torch.device) -> Run:
    edges = torch.tensor([0, num_tokens], device=device)
    build = importlib.import_module("fla.ops.cp").build_cp_context
    context = build(edges, dist.group.WORLD, cu_seqlens_cpu=edges.cpu())

    def run(recurrence: Recurrence) -> Tensor:
        assert isinstance(recurrence, DeltaRule)
        query, key, value, g, beta = recurrence.inputs
        given = {"g": g, "beta": beta, "cp_context": context, **recurrence.options}
        out, _ = recurrence.rule(query, key, value, **given)
        return out

    return run


WAYS: Mapping[str, Callable[[int, torch.device], Run]] = MappingProxyType(
    {"states": by_states, "heads": by_heads, "fla": by_fla}
)


def covers(way: str, layer: Layer) -> bool:
    """Whether the way is there for such a layer."""
    return way != "fla" or (
        layer.kind == "delta rule" and importlib.util.find_spec("fla") is not None
    )


def shard_of(whole: Recurrence) -> Recurrence:
    """This rank's part of a row, with leaves of its own."""
    return whole.with_inputs([own(x.detach()).clone().requires_grad_() for x in whole.inputs])


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor `[B, all tokens, ...]`."""
    layout = contiguous(tensor.shape[1], dist.get_world_size())
    return layout.shard(tensor, dist.get_rank(), 1)


def results(run: Run, recurrence: Recurrence, gradient: Tensor) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    out = run(recurrence)
    return [out.detach(), *torch.autograd.grad(out, recurrence.inputs, gradient)]


def check(way: str, layer: Layer, device: torch.device) -> float:
    """The largest error of the way's results against one rank with the whole row, relative.

    Collective. Raises RuntimeError where it is more than rounding.
    """
    num_tokens = CHECK_TOKENS * dist.get_world_size()
    whole = make_recurrence(layer, num_tokens, device)
    shape = whole.run(Interval(0, num_tokens), None, ends=False)[0].shape
    generator = torch.Generator(device).manual_seed(1)
    gradient = torch.randn(shape, generator=generator, device=device).to(dtype_on(device))
    wanted = results(lambda each: run_whole(each, num_tokens), whole, gradient)
    found = results(WAYS[way](num_tokens, device), shard_of(whole), own(gradient))
    errors = [
        float((one - other).double().norm() / other.double().norm())
        for one, other in zip(found, map(own, wanted), strict=True)
    ]
    of_ranks = [error for errors_of_rank in everyone(errors) for error in errors_of_rank]
    if not all(error <= TOLERANCE[dtype_on(device)] for error in of_ranks):
        raise RuntimeError(f"{way} of {layer.name} differs from one rank by {of_ranks}.")
    return max(of_ranks)


def run_whole(recurrence: Recurrence, num_tokens: int) -> Tensor:
    return recurrence.run(Interval(0, num_tokens), None, ends=False)[0]


def timed(way: str, layer: Layer, num_tokens: int, clock: Clock) -> dict[str, Timing]:
    """A forward, and a forward with its backward. Collective."""
    run = WAYS[way](num_tokens, clock.device)
    shard = make_recurrence(layer, num_tokens // dist.get_world_size(), clock.device)

    def both() -> None:
        out = run(shard)
        torch.autograd.grad(out, shard.inputs, torch.ones_like(out))

    with torch.no_grad():
        forward = clock.aligned_time(lambda: run(shard))
    return {"forward": forward, "both": clock.aligned_time(both)}


COLUMNS = (
    Column("layer", lambda row: row["layer"]),
    Column("ranks", lambda row: str(row["num_ranks"])),
    Column("tokens", lambda row: f"{row['num_tokens']:,}"),
    Column("way", lambda row: row["way"]),
    Column("direction", lambda row: row["direction"]),
    number("ms", "seconds", "{:.2f}", 1e3),
    spread("ms", 1e3),
)


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add(
        "--tokens", type=int, nargs="*", default=[131072], help="of the whole row; none: only check"
    )
    add("--layers", nargs="+", choices=[layer.name for layer in LAYERS], help="default: all")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    add("--iterations", type=int, default=10, help="timed calls (default 10)")
    arguments = parser.parse_args(command_line)
    device = start()
    require_even_shards(arguments.tokens)
    rows, clock = list[Row](), Clock(device, arguments.iterations)
    for layer in LAYERS:
        if arguments.layers and layer.name not in arguments.layers:
            continue
        for way in arguments.ways:
            if covers(way, layer):
                for row in measured(way, layer, arguments.tokens, clock):
                    rows.append(row)
                    if is_first_rank():
                        print(*(column.of(row) for column in COLUMNS), sep="  ", flush=True)
    if rows and is_first_rank():
        write(rows, machine(device), arguments.out)
    finish()


def require_even_shards(lengths: Sequence[int]) -> None:
    """Raise ValueError for rows that ranks can't share evenly, as fla's way has to."""
    world = dist.get_world_size()
    if uneven := [length for length in lengths if length < 1 or length % world]:
        raise ValueError(
            f"--tokens {uneven[0]}: {world} ranks share a row in equal shards. Use a multiple of "
            f"{world}."
        )


def measured(way: str, layer: Layer, lengths: Sequence[int], clock: Clock) -> Iterator[Row]:
    error = check(way, layer, clock.device)
    for num_tokens in lengths:
        for direction, timing in timed(way, layer, num_tokens, clock).items():
            yield {
                "layer": layer.name,
                "num_ranks": dist.get_world_size(),
                "num_tokens": num_tokens,
                "way": way,
                "direction": direction,
                "check_error": error,
                **timing._asdict(),
            }


def write(rows: Sequence[Row], where: Row, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_lines([{**row, "machine": where} for row in rows], out / "recurrence_shared.jsonl")
    text = heading("Recurrences of one layer, shared by ranks", where) + table(COLUMNS, rows)
    (out / "recurrence_shared.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
