"""Two ranks that share a document run its recurrence in waves of heads.

A rank has the states of the first wave before the other one runs the second, and gradients of
states as early on the way back.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch.engine.chain.delta_rule import DeltaRule
from longctx_patch.engine.chain.recurrence import Recurrence, run_recurrence
from longctx_patch.engine.chain.run import ChainRun, checked_chain
from longctx_patch.engine.chain.state_space import StateSpace
from longctx_patch.plans.chain import Chain, make_chain
from longctx_patch.plans.recurrent import head_waves
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import contiguous, zigzag
from longctx_patch.transport import Message, VirtualTransport, run_virtual_ranks
from longctx_patch.transport.protocol import Pending
from tests.engine.chain.test_replay import scan
from tests.reference import relative_error

LENGTH, HEADS, GROUPS, DIM, VALUE_DIM = 22, 4, 2, 3, 2
EVENTS = {
    0: ["run", "exchange", "run", "exchange", "exchange", "back", "exchange", "back"],
    1: ["exchange", "run", "exchange", "run", "back", "exchange", "back", "exchange"],
}
"""Of each rank, in forward and backward."""


def rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """A gated delta rule, token by token. As kernels do, heads of values share those of keys."""
    times = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(times, dim=2) for x in (query, key))
    state = value.new_zeros(*value.shape[:1], *value.shape[2:3], key.shape[3], value.shape[3])
    state = state if initial_state is None else initial_state
    outputs = []
    for t in range(value.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        found = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        new = beta[:, t, :, None] * (value[:, t] - found)
        state = state + key[:, t, ..., None] * new[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outputs, dim=1), state


def inputs_of(kind: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "delta rule": [(GROUPS, DIM), (GROUPS, DIM), (HEADS, VALUE_DIM), (HEADS,), (HEADS,)],
        "state space": [(HEADS, VALUE_DIM), (HEADS,), (GROUPS, DIM), (GROUPS, DIM)],
    }
    made = [
        torch.randn(2, LENGTH, *shape, generator=generator, dtype=torch.float64) / 2
        for shape in shapes[kind]
    ]
    return [-x.abs() if x.ndim == 3 and kind == "delta rule" else x for x in made]


def recurrence_over(kind: str, inputs: list[Tensor], events: list[str]) -> Recurrence:
    def noting(run: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            events.append("run")
            found = run(*args, **options)
            out = found[0] if isinstance(found, tuple) else found
            out.register_hook(lambda _: events.append("back"))
            return found

        return noted

    if kind == "delta rule":
        return DeltaRule(noting(rule), tuple(inputs))
    decay = -torch.arange(1.0, HEADS + 1, dtype=torch.float64)
    return StateSpace(noting(of_groups), tuple(inputs), decay)


def of_groups(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any) -> Any:
    times = x.shape[2] // b.shape[2]
    b, c = (each.repeat_interleave(times, dim=2) for each in (b, c))
    return scan(x, dt.abs(), a, b, c, **options)


class Noting:
    """A transport that notes exchanges."""

    def __init__(self, transport: VirtualTransport, events: list[str]) -> None:
        self._transport, self._events = transport, events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def exchange(self, sends: list[Message], receives: list[Message]) -> Pending:
        self._events.append("exchange")
        return self._transport.exchange(sends, receives)


def step(kind: str, num_ranks: int, transport: VirtualTransport) -> tuple[list[Tensor], list[str]]:
    """([output, gradients of the inputs], what happened) of one rank."""
    layout, events = contiguous(LENGTH, num_ranks), list[str]()
    rank = transport.group_rank
    inputs = [layout.shard(x, rank, 1).requires_grad_() for x in inputs_of(kind)]
    chain = checked_chain(layout, Documents.one(LENGTH))
    run = ChainRun(chain, Noting(transport, events))  # type: ignore[arg-type]
    out = run_recurrence(run, recurrence_over(kind, inputs, events))
    grads = torch.autograd.grad(out.square().sum(), inputs)
    return [out.detach(), *grads], events


@pytest.mark.parametrize("kind", ["delta rule", "state space"])
def test_waves_are_exact_and_in_turn(kind: str) -> None:
    layout = contiguous(LENGTH, 2)
    ((wanted, alone),) = run_virtual_ranks(1, lambda transport: step(kind, 1, transport))
    assert alone == ["run", "back"]
    found = run_virtual_ranks(2, lambda transport: step(kind, 2, transport))
    for number, right in enumerate(wanted):
        whole = layout.unshard([values[number] for values, _ in found], 1)
        assert relative_error(whole, right) < 1e-12
    assert dict(enumerate(events for _, events in found)) == EVENTS


def waves_of(chain: Chain, heads: int = 4, groups: int = 2) -> int:
    recurrence = DeltaRule(
        rule,
        (
            *(torch.zeros(1, 1, groups, 2),) * 2,
            torch.zeros(1, 1, heads, 2),
            *(torch.zeros(1, 1, heads),) * 2,
        ),
    )
    return head_waves(recurrence.shape, chain)


def test_where_there_are_waves() -> None:
    """Not where nobody waits, nor where ranks find their maps in the meantime."""
    one = Documents.one(96)
    shared = make_chain(contiguous(96, 2), one)
    assert waves_of(shared) == 2
    assert waves_of(shared, heads=3, groups=3) == 1
    assert waves_of(shared, heads=2, groups=1) == 1
    for layout in (contiguous(96, 1), zigzag(96, 2), contiguous(96, 3), contiguous(96, 4)):
        assert waves_of(make_chain(layout, one)) == 1
    whole = Documents((48, 48), 96)
    assert waves_of(make_chain(contiguous(96, 2), whole)) == 1
    little = Documents((44, 8, 44), 96)  # which one rank waits for
    assert waves_of(make_chain(contiguous(96, 2), little)) == 1
    much = Documents((8, 80, 8), 96)
    assert waves_of(make_chain(contiguous(96, 2), much)) == 2
