"""Mamba-2 over shards: S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T (Dao and Gu 2024, arXiv
2405.21060). The state is a matrix `[P, N]` per head, and a segment takes it to m S + U with one
number m per head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from longctx_patch.engine.chain.extents import MOST_PLACES, extent
from longctx_patch.plans.recurrent import RecurrentShape
from longctx_patch.sequence.layout import Interval

Scan = Callable[..., Any]
"""A kernel: (x, dt, A, B, C, initial_states=, return_final_states=, ...) to the output, or to
(output, final states)."""

_BY_HEAD = ("D", "dt_bias")
"""Options of the kernel that have an entry for each head."""


@dataclass(frozen=True)
class StateSpace:
    """The recurrence of one layer over this rank's tokens."""

    scan: Scan
    inputs: tuple[Tensor, ...]
    """x `[B, L, H, P]`, dt `[B, L, H]`, B and C `[B, L, groups, N]`."""
    a_H: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the kernel: chunk_size, D, dt_bias, dt_softplus, dt_limit."""
    is_kernel: Callable[[], bool] = lambda: False
    """Whether the scan is mamba-ssm's kernel. It keeps documents apart whose numbers are `seq_idx`,
    and counts places in memory with 32 bits."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        options = (self.options.get(name) for name in _BY_HEAD)
        return self.a_H, *(value for value in options if isinstance(value, Tensor))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """`[B, H, P, N]`."""
        x, _, b, _ = self.inputs
        return (x.shape[0], x.shape[2], x.shape[3], b.shape[3])

    @property
    def map_shape(self) -> tuple[int, ...]:
        """`[B, H]`."""
        return self.state_shape[:2]

    @property
    def shape(self) -> RecurrentShape:
        x, _, b, _ = self.inputs
        return RecurrentShape(
            kind="Mamba-2",
            num_heads=x.shape[2],
            num_groups=b.shape[2],
            key_dim=b.shape[3],
            value_dim=x.shape[3],
            batch=x.shape[0],
            itemsize=x.dtype.itemsize,
        )

    def with_inputs(self, inputs: Sequence[Tensor]) -> "StateSpace":
        return replace(self, inputs=tuple(inputs))

    def of_heads(self, inputs: Sequence[Tensor], heads: Interval) -> "StateSpace":
        mine = slice(heads.start, heads.stop)
        by_head = {
            name: value[mine]
            for name in _BY_HEAD
            if isinstance(value := self.options.get(name), Tensor)
        }
        return replace(
            self, inputs=tuple(inputs), a_H=self.a_H[mine], options=self.options | by_head
        )

    def run(
        self, slots: Interval, state: Tensor | None, *, ends: bool
    ) -> tuple[Tensor, Tensor | None]:
        x, dt, b, c = self._part(slots)
        given = {"initial_states": state, "return_final_states": ends}
        found = self.scan(x, dt, self.a_H, b, c, **given, **self.options)
        return found if ends else (found, None)

    def run_documents(self, edges: Sequence[int]) -> Tensor | None:
        x, slots = self.inputs[0], Interval(edges[0], edges[-1])
        if not self.is_kernel() or self._most_places(slots) > MOST_PLACES:
            return None
        sizes = tuple(after - edge for edge, after in pairwise(edges))
        numbers = _numbers(sizes, x.shape[0], x.device, torch.is_inference_mode_enabled())
        given = self.options | {"seq_idx": numbers}
        out, _ = replace(self, options=given).run(slots, None, ends=False)
        return out

    def _part(self, slots: Interval) -> list[Tensor]:
        """The inputs of some of the tokens, as the kernel can count them.

        Raises ValueError where it can't: it would compute other numbers in silence.
        """
        parts = [tensor[:, slots.start : slots.stop] for tensor in self.inputs]
        if not self.is_kernel():
            return parts
        if (most := self._most_places(slots)) > MOST_PLACES:
            raise ValueError(
                f"{slots.size:,} tokens of a document on one rank are {most:,} numbers of a tensor "
                f"in mamba-ssm's scan, which computes wrong ones beyond {MOST_PLACES:,}. Share the "
                "row between more GPUs, or use fewer rows in a batch."
            )
        return [part if extent(part) <= MOST_PLACES else part.contiguous() for part in parts]

    def _most_places(self, slots: Interval) -> int:
        """Numbers of the largest tensor in a scan of some tokens: its inputs, or the states or the
        products of C and B that it holds of each chunk."""
        batch, heads, value_dim, state_dim = self.state_shape
        chunk = int(self.options["chunk_size"])
        chunks = batch * -(-slots.size // chunk)
        of_inputs = (batch * slots.size * prod(tensor.shape[2:]) for tensor in self.inputs)
        products = chunks * self.inputs[2].shape[2] * chunk**2
        return max(*of_inputs, chunks * heads * value_dim * state_dim, products)

    def map(self, slots: Interval) -> tuple[Tensor, Tensor]:
        """(m, U). The kernel itself says what is left of a state of one number, so that m is made
        of time steps as it rounds them."""
        _, u = self.run(slots, None, ends=True)
        assert u is not None
        x, dt, b, c = (tensor[..., :1] if tensor.ndim == 4 else tensor for tensor in self.inputs)
        alone = replace(self, inputs=(torch.zeros_like(x), dt, b, c))
        one = u.new_ones(*self.map_shape, 1, 1)
        _, left = alone.run(slots, one, ends=True)
        assert left is not None
        return left, u

    def apply(self, m: Tensor, state: Tensor) -> Tensor:
        return m.view(*self.map_shape, 1, 1) * state


@lru_cache(maxsize=4)
def _numbers(
    sizes: tuple[int, ...], batch: int, device: torch.device, in_inference: bool
) -> Tensor:
    """`[B, L]`, int32: the document of each token. The same tensor for all layers, which keep it
    for backward; what is made in inference mode can't be."""
    numbers = torch.arange(len(sizes), dtype=torch.int32)
    row = numbers.repeat_interleave(torch.tensor(sizes))
    return row.repeat(batch, 1).to(device)
