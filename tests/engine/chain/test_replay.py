"""Recurrent layers in checkpointed regions: what each run of a region exchanges, and that gradients
are those of one process.

Under policies that keep attention a recompute has what other ranks sent from its frame, so that it
never calls its transport, and waits for nobody.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longctx_patch.engine.chain.chain_run import ChainRun, checked_chain
from longctx_patch.engine.chain.convolution import run_convolution
from longctx_patch.engine.chain.recurrence import run_recurrence
from longctx_patch.engine.chain.state_space import StateSpace
from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.memory.replay import checkpoint_contexts
from longctx_patch.memory.run_layer import run_layer
from longctx_patch.plans import chain as chain_plan
from longctx_patch.plans.chain import ChainTraffic
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout
from longctx_patch.sequence.placement import place
from longctx_patch.transport import Message, VirtualTransport, run_virtual_ranks
from longctx_patch.transport.protocol import Pending
from tests.reference import relative_error

HEADS, WIDTH, STATE, REACH = 2, 3, 2, 3
CHANNELS = HEADS * (WIDTH + 1 + 2 * STATE)
ROWS = {"plain": Documents.one(29), "packed": Documents((1, 2, 13, 3, 1, 9), 29)}
Phase = Literal["forward", "recompute", "backward"]


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    initial_states: Tensor | None,
    return_final_states: bool,
) -> Any:
    """Mamba-2, token by token."""
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[3])
    state = state if initial_states is None else initial_states
    outputs = []
    for t in range(x.shape[1]):
        decay, new = torch.exp(a * dt[:, t]), dt[:, t, :, None] * x[:, t]
        state = decay[..., None, None] * state + new[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1))
    out = torch.stack(outputs, dim=1)
    return (out, state) if return_final_states else out


def weights() -> list[Tensor]:
    """Of the convolution, of decays, and of the region's output."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((CHANNELS, 1, REACH + 1), (HEADS,), (WIDTH, WIDTH))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [weight.requires_grad_() for weight in made]


def row(num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(1, num_tokens, CHANNELS, generator=generator, dtype=torch.float64)


def region(run: ChainRun, leaves: Sequence[Tensor], hidden: Tensor) -> Tensor:
    """A convolution, a recurrence, and products whose inputs backward needs."""
    taps, decay, last = leaves

    def convolve(x: Tensor, before: Tensor | None) -> Tensor:
        filled = F.pad(x, (REACH, 0)) if before is None else torch.cat([before, x], dim=2)
        return F.conv1d(filled, taps, groups=CHANNELS)

    mixed = torch.tanh(run_convolution(run, convolve, hidden.transpose(1, 2), REACH))
    by_head = mixed.transpose(1, 2).unflatten(2, (HEADS, -1))
    x, dt, b, c = by_head.split([WIDTH, 1, STATE, STATE], dim=3)
    space = StateSpace(scan, (x, dt[..., 0].abs(), b, c), -decay.abs())
    return torch.tanh(run_recurrence(run, space) @ last)


class Watched:
    """A transport that notes the phase of each exchange."""

    def __init__(self, transport: VirtualTransport) -> None:
        self._transport = transport
        self.phase: Phase = "forward"
        self.calls: list[Phase] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.calls.append(self.phase)
        return self._transport.exchange(sends, receives)


class Found(NamedTuple):
    out: Tensor
    grads: list[Tensor]
    runs: int
    calls: list[Phase]
    sent: dict[Phase, Traffic]
    planned: ChainTraffic


Checkpoint = Callable[..., Tensor]


def of_policy(policy: LayerPolicy, share: float = 1.0) -> Checkpoint:
    def run(function: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        host = HostCopies(torch.device("cpu"))
        found: Tensor = run_layer(policy, function, hidden, host=host, share=share)
        return found

    return run


def step(
    layout: Layout, documents: Documents, checkpointed: Checkpoint, transport: VirtualTransport
) -> Found:
    """Forward and backward of one region on one rank."""
    watched, leaves = Watched(transport), weights()
    runs: list[ChainRun] = []
    sent: dict[Phase, Traffic] = dict.fromkeys(("forward", "recompute", "backward"), Traffic())
    counted = Traffic()

    def count(phase: Phase) -> None:
        nonlocal counted
        now = Traffic(transport.counters.messages, transport.counters.bytes)
        new = Traffic(now.messages - counted.messages, now.bytes - counted.bytes)
        sent[phase], counted = sent[phase] + new, now

    def forward(hidden: Tensor) -> Tensor:
        count(watched.phase)
        watched.phase = "recompute" if runs else "forward"
        runs.append(ChainRun(checked_chain(layout, documents), watched))
        try:
            return region(runs[-1], leaves, hidden)
        finally:  # torch stops a recompute by an exception
            count(watched.phase)
            watched.phase = "backward"

    hidden = layout.shard(row(documents.num_tokens), transport.group_rank, 1).requires_grad_()
    out = checkpointed(forward, hidden)
    out.square().sum().backward()
    count("backward")
    grads = [x.grad for x in (hidden, *leaves) if x.grad is not None]
    return Found(out.detach(), grads, len(runs), watched.calls, sent, runs[0].planned)


def steps(
    num_ranks: int, documents: Documents, checkpointed: Checkpoint, name: Any = "zigzag"
) -> list[Found]:
    """The step of all ranks, compared with that of one that runs each document by itself."""
    layout = place(name, documents, ring=num_ranks, ulysses=1)
    found = run_virtual_ranks(num_ranks, partial(step, layout, documents, checkpointed))
    alone = place("contiguous", documents, ring=1, ulysses=1)
    wanted = run_virtual_ranks(1, partial(step, alone, documents, of_policy("none")))[0]
    assert relative_error(layout.unshard([f.out for f in found], 1), wanted.out) < 1e-12
    inputs = layout.unshard([f.grads[0] for f in found], 1)
    assert relative_error(inputs, wanted.grads[0]) < 1e-12
    for number in range(1, len(wanted.grads)):
        total = torch.stack([f.grads[number] for f in found]).sum(0)
        assert relative_error(total, wanted.grads[number]) < 1e-12
    return found


KEEPING: dict[str, Checkpoint] = {
    "attention": of_policy("attention"),
    "a share": of_policy("attention", 0.25),
    "offload": of_policy("offload"),
}
EXCHANGING: dict[str, Checkpoint] = {
    "full": of_policy("full"),
    "nothing kept": of_policy("attention", 0.0),
    "inputs on the host": of_policy("offload", 0.0),
}


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("documents", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_recompute_of_what_was_kept_neither_sends_nor_waits(
    num_ranks: int, documents: Documents, name: str
) -> None:
    for policy, checkpointed in KEEPING.items():
        for found in steps(num_ranks, documents, checkpointed, name):
            assert found.runs == 2
            assert found.calls == ["forward"] * 2 + ["backward"] * 2, policy
            assert found.planned.replay == Traffic()
            assert found.sent == {
                "forward": found.planned.forward,
                "recompute": Traffic(),
                "backward": found.planned.backward,
            }, policy


@pytest.mark.parametrize("documents", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("policy", EXCHANGING)
def test_a_recompute_without_a_frame_exchanges_again(policy: str, documents: Documents) -> None:
    for found in steps(4, documents, EXCHANGING[policy]):
        assert found.calls == ["forward"] * 2 + ["recompute"] * 2 + ["backward"] * 2
        assert found.sent["recompute"] == found.sent["forward"] == found.planned.forward
        assert found.sent["backward"] == found.planned.backward


def test_what_is_large_is_exchanged_again_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails of the convolution have 3 * 16 numbers, states 12, and maps 2 more for decays. With
    four contiguous shards the last rank gets most: 12 + 14 + 14."""
    for limit, kept in ((8 * 40, ("states",)), (8 * 39, ()), (8 * 48, ("states", "tails"))):
        monkeypatch.setattr(chain_plan, "KEPT_AT_MOST", limit)
        found = steps(4, ROWS["plain"], of_policy("attention"), "contiguous")
        again: list[Phase] = ["recompute"] * (2 - len(kept))
        for rank in found:
            assert rank.calls == ["forward"] * 2 + again + ["backward"] * 2
            assert rank.sent["recompute"] == rank.planned.replay
    assert found[0].planned.forward == Traffic(1 + 3, 8 * (48 + 3 * 12))


def test_documents_that_stay_on_their_rank_exchange_nothing() -> None:
    documents = Documents((7, 7, 7), 21)
    for found in steps(3, documents, of_policy("attention"), "contiguous"):
        assert (found.calls, found.planned) == ([], ChainTraffic())


def test_a_graph_can_go_backward_twice() -> None:
    """Each backward takes what was kept from the beginning on."""
    documents = ROWS["plain"]
    layout = place("zigzag", documents, ring=2, ulysses=1)

    def on_one_rank(transport: VirtualTransport) -> int:
        watched, leaves = Watched(transport), weights()

        def forward(hidden: Tensor) -> Tensor:
            run = ChainRun(checked_chain(layout, documents), watched)
            return region(run, leaves, hidden)

        hidden = layout.shard(row(29), transport.group_rank, 1).requires_grad_()
        loss = of_policy("attention")(forward, hidden).square().sum()
        first = torch.autograd.grad(loss, (hidden, *leaves), retain_graph=True)
        second = torch.autograd.grad(loss, (hidden, *leaves))
        assert all(map(torch.equal, first, second))
        return len(watched.calls)

    assert run_virtual_ranks(2, on_one_rank) == [2 + 2 + 2] * 2


def test_what_was_kept_is_freed_with_its_graph() -> None:
    documents = ROWS["plain"]
    layout = place("contiguous", documents, ring=2, ulysses=1)

    def on_one_rank(transport: VirtualTransport) -> list[int]:
        leaves, kept, frames = weights(), list[weakref.ref[Tensor]](), list[Any]()

        def store(tensor: Tensor) -> Callable[[], Tensor]:
            kept.append(weakref.ref(tensor.untyped_storage()))  # type: ignore[arg-type]
            return lambda: tensor

        def contexts() -> Any:
            pair = checkpoint_contexts(store)
            frames.append(weakref.ref(pair[0]._frame))  # type: ignore[attr-defined]
            return pair

        def forward(hidden: Tensor) -> Tensor:
            run = ChainRun(checked_chain(layout, documents), transport)
            return region(run, leaves, hidden)

        hidden = layout.shard(row(29), transport.group_rank, 1).requires_grad_()
        out = checkpoint(forward, hidden, use_reentrant=False, context_fn=contexts)
        alive = [frames[0]() is not None, len(kept)]
        out.square().sum().backward()
        del out
        gc.collect()
        return [*map(int, alive), frames[0]() is not None]

    assert run_virtual_ranks(2, on_one_rank) == [[1, 0, 0], [1, 2, 0]]
