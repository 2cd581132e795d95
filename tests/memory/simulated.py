"""Training under `auto` on a simulated machine: its memory is a sum, without tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from longctx_patch.memory.auto import MEASURE, AutoPolicy
from longctx_patch.memory.limits import MARGIN
from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.passes import Pass
from tests.memory.live_bytes import Counts

LAYERS = 8
CHEAP, EXTRA = 2, 10
"""Bytes per token that a layer keeps under `attention`, and that `none` adds to them."""
KEPT = {"offload": 0, "attention": CHEAP, "none": CHEAP + EXTRA}


@dataclass
class Machine(Counts):
    highest: int = 0
    """The peak since the start, which is never reset."""
    pieces: float = 0.0
    """Share of the capacity that fragmentation takes."""

    def hold(self, num_bytes: int) -> None:
        super().hold(num_bytes)
        self.tried_again += self.now > (1 - self.pieces) * self.capacity_bytes
        self.highest = max(self.highest, self.now)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        self.hold(num_bytes)
        yield
        self.now -= num_bytes


@dataclass
class Training:
    """Passes of a model with equal layers on one machine."""

    machine: Machine
    auto: AutoPolicy
    loss_bytes: int = 0
    """Bytes held while the loss is computed, when all activations are alive."""
    gradient_bytes: int = 0
    """Bytes of one layer's gradients, which stay from the first backward until `step`."""
    gradients: int = 0
    """Bytes of gradients that are alive."""

    @classmethod
    def on(cls, capacity: int, *, offloads: bool = False, **needs: int) -> "Training":
        machine = Machine(capacity)
        machine.hold(100)  # weights
        host = HostCopies(torch.device("cpu")) if offloads else None
        return cls(machine, AutoPolicy(machine, ["layer"] * LAYERS, host), **needs)

    @property
    def whole(self) -> int:
        return self.auto.policies.count("none")

    def forward(self, tokens: int, *, others: int = MEASURE) -> Pass:
        """`others`: the number of climbs that another rank proposes (default: the same)."""
        proposed = self.auto.propose(tokens)
        this = self.auto.begin(tokens, proposed if others == MEASURE else min(proposed, others))
        for layer in range(LAYERS):
            self.auto.run(layer, partial(self.compute, tokens, layer), torch.zeros(1))
        with self.machine.holding(self.loss_bytes):
            return this

    def per_token(self, layer: int) -> int:
        return KEPT[self.auto.policies[layer]]

    def compute(self, tokens: int, layer: int, _: torch.Tensor) -> None:
        self.machine.hold(tokens * self.per_token(layer))

    def backward(self, this: Pass) -> None:
        for layer in reversed(range(LAYERS)):
            again = KEPT["none"] - self.per_token(layer)
            with self.machine.holding(again * this.num_tokens):
                if self.gradients < self.gradient_bytes * LAYERS:
                    self.machine.hold(self.gradient_bytes)
                    self.gradients += self.gradient_bytes
            self.machine.now -= this.num_tokens * self.per_token(layer)
        self.auto.end(this)

    def train(self, tokens: int = 10, *, others: int = MEASURE) -> int:
        """Run one pass; return how many layers were whole (`none`) in it."""
        self.backward(self.forward(tokens, others=others))
        return self.whole

    def step(self, states: int = 0) -> None:
        """The optimizer's step: makes states of this many bytes and frees gradients."""
        self.machine.hold(states - self.gradients)
        self.gradients = 0


def capacity_for(whole: int, *, tokens: int = 10, besides: int = 100) -> int:
    """A capacity for `whole` whole layers that is a byte too small for one more."""
    need = besides + tokens * (CHEAP * LAYERS + EXTRA * whole)
    return int((need + tokens * EXTRA - 1) / (1 - MARGIN)) - 1
