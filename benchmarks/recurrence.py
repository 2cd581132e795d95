"""Time the recurrence of one layer on one device: of a whole shard, from a state, and its map.

    python benchmarks/recurrence.py --out results/ --tokens 16384 32768 65536

What ranks that share a row pay for handing on states: a rank in the middle runs `map` and then
`from_state` where one process runs `whole`. `heads` is `whole` with half of the heads, what a rank
runs that exchanges heads with another one. The kernels are those that transformers takes: of
flash-linear-attention and mamba-ssm, where they are installed. Before it is timed, a kernel's
output over two segments has to be that of the whole row, within twice the rounding of its dtype.
Writes recurrence.jsonl and recurrence.md into --out.
"""

import argparse
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Clock, Row, dtype_on, machine, own_device
from report import Column, heading, number, spread, table, write_lines
from torch import Tensor
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from longctx_patch.engine.chain.delta_rule import DeltaRule
from longctx_patch.engine.chain.recurrence import Recurrence
from longctx_patch.engine.chain.state_space import StateSpace
from longctx_patch.sequence.layout import Interval

SEED = 0
CHECK_TOKENS = 1024
TOLERANCE = {torch.bfloat16: 2 * 2**-8, torch.float32: 1e-4}


@dataclass(frozen=True)
class Layer:
    """Sizes of a published model's recurrent layer."""

    name: str
    kind: str
    num_heads: int
    key_dim: int
    """Of a delta rule's key, or of a Mamba-2 state."""
    value_dim: int
    num_groups: int
    """Of Mamba-2's B and C; a delta rule is given a key for each head."""


LAYERS = (
    Layer("qwen3.5-9b", "delta rule", 32, 128, 128, 32),
    Layer("nemotron-h-8b", "state space", 128, 128, 64, 8),
)


def kernel_of(kind: str) -> Callable[..., Any]:
    """The function of transformers, which runs the installed kernel."""
    if kind == "delta rule":
        return modeling_qwen3_5.torch_chunk_gated_delta_rule
    return modeling_bamba.mamba2_chunk_scan


def runs_on_torch(function: Callable[..., Any]) -> bool:
    """Whether transformers found no kernel for it."""
    found = inspect.getclosurevars(inspect.unwrap(function, stop=lambda f: not _wraps(f))).nonlocals
    return not found.get("is_new_implementation", False)


def _wraps(function: Callable[..., Any]) -> bool:
    return "is_new_implementation" not in function.__code__.co_freevars


def make_recurrence(layer: Layer, num_tokens: int, device: torch.device) -> Recurrence:
    """The layer's recurrence over a shard of random tokens."""
    generator = torch.Generator(device).manual_seed(SEED)
    dtype, heads = dtype_on(device), layer.num_heads

    def randoms(*shape: int, of: torch.dtype = dtype) -> Tensor:
        made = torch.randn(1, num_tokens, *shape, generator=generator, device=device)
        return made.to(of).requires_grad_()

    if layer.kind == "delta rule":
        key = (heads, layer.key_dim)
        decays = (-F.softplus(randoms(heads, of=torch.float32))).detach().requires_grad_()
        beta = randoms(heads).sigmoid().detach().requires_grad_()
        inputs = (randoms(*key), randoms(*key), randoms(heads, layer.value_dim), decays, beta)
        return DeltaRule(kernel_of(layer.kind), inputs, {"use_qk_l2norm_in_kernel": True})
    b, c = (randoms(layer.num_groups, layer.key_dim) for _ in range(2))
    driven = (randoms(heads, layer.value_dim), randoms(heads), b, c)
    options = {"chunk_size": 256, "dt_softplus": True}
    return StateSpace(kernel_of(layer.kind), driven, -torch.ones(heads, device=device), options)


def half_of(layer: Layer) -> Layer:
    """With half of the heads."""
    heads, groups = layer.num_heads // 2, layer.num_groups // 2
    return Layer(layer.name, layer.kind, heads, layer.key_dim, layer.value_dim, groups)


def check(layer: Layer, device: torch.device) -> float:
    """The error of two segments against the whole, relative.

    Raises RuntimeError where it is more than rounding.
    """
    recurrence = make_recurrence(layer, CHECK_TOKENS, device)
    first, second = Interval(0, 333), Interval(333, CHECK_TOKENS)
    with torch.no_grad():
        wanted, _ = recurrence.run(Interval(0, CHECK_TOKENS), None, ends=False)
        begun, state = recurrence.run(first, None, ends=True)
        m, u = recurrence.map(first)
        assert state is not None
        composed = recurrence.apply(m, torch.zeros_like(state)) + u
        rest, _ = recurrence.run(second, composed, ends=False)
    found = torch.cat([begun, rest], dim=1).double()
    error = float((found - wanted.double()).norm() / wanted.double().norm())
    if not error <= TOLERANCE[dtype_on(device)]:
        raise RuntimeError(f"{layer.name}: segments differ from the whole by {error:.2g}.")
    return error


def calls(layer: Layer, num_tokens: int, device: torch.device) -> Iterator[tuple[str, Any, Any]]:
    """(name, recurrence, what it runs: a function that returns outputs) of each part."""
    every, recurrence = Interval(0, num_tokens), make_recurrence(layer, num_tokens, device)
    dtype = torch.promote_types(dtype_on(device), torch.float32)
    state = torch.randn(recurrence.state_shape, device=device, dtype=dtype).requires_grad_()
    yield "whole", recurrence, lambda: [recurrence.run(every, None, ends=False)[0]]
    yield "from_state", recurrence, lambda: [recurrence.run(every, state, ends=False)[0]]
    yield "map", recurrence, lambda: [*recurrence.map(every)]
    half = make_recurrence(half_of(layer), num_tokens, device)
    yield "heads", half, lambda: [half.run(every, None, ends=False)[0]]


def timed(layer: Layer, num_tokens: int, clock: Clock) -> Iterator[Row]:
    """Forward and forward with backward of each part."""
    for part, recurrence, call in calls(layer, num_tokens, clock.device):

        def both(call: Callable[[], list[Tensor]] = call, rec: Recurrence = recurrence) -> None:
            outs = call()
            grads = [torch.ones_like(out) for out in outs]
            torch.autograd.grad(outs, rec.inputs, grads, allow_unused=True)

        with torch.no_grad():
            forward = clock.device_time(call)
        for direction, timing in (("forward", forward), ("both", clock.device_time(both))):
            yield {
                "layer": layer.name,
                "num_tokens": num_tokens,
                "part": part,
                "direction": direction,
                **timing._asdict(),
            }


COLUMNS = (
    Column("layer", lambda row: row["layer"]),
    Column("tokens", lambda row: f"{row['num_tokens']:,}"),
    Column("part", lambda row: row["part"]),
    Column("direction", lambda row: row["direction"]),
    number("ms", "seconds", "{:.2f}", 1e3),
    spread("ms", 1e3),
    Column("by", lambda row: row["by"]),
)


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--tokens", type=int, nargs="+", default=[16384, 65536], help="of a shard")
    add("--layers", nargs="+", choices=[layer.name for layer in LAYERS], help="default: all")
    add("--iterations", type=int, default=10, help="timed calls (default 10)")
    arguments = parser.parse_args(command_line)
    device = own_device()
    rows, clock = list[Row](), Clock(device, arguments.iterations)
    for layer in LAYERS:
        if arguments.layers and layer.name not in arguments.layers:
            continue
        by = "torch" if runs_on_torch(kernel_of(layer.kind)) else "kernels"
        error = check(layer, device)
        for num_tokens in arguments.tokens:
            for row in timed(layer, num_tokens, clock):
                rows.append({**row, "by": by, "check_error": error})
    arguments.out.mkdir(parents=True, exist_ok=True)
    where = machine(device)
    write_lines([{**row, "machine": where} for row in rows], arguments.out / "recurrence.jsonl")
    text = heading("Recurrences of one layer", where) + table(COLUMNS, rows)
    (arguments.out / "recurrence.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
