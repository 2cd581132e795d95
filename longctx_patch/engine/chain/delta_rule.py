"""Gated delta rules over shards: S_t = (I - b k k^T) a S_{t-1} + b k v^T.

Yang et al. 2024 (arXiv 2412.06464) with one decay a per head, and Kimi Delta Attention (arXiv
2510.26692) with one per channel of the key. The state is a matrix `[K, V]` per head, and a segment
takes it to M S + U with M `[K, K]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from longctx_patch.engine.chain.extents import MOST_PLACES
from longctx_patch.plans.recurrent import RecurrentShape
from longctx_patch.sequence.layout import Interval

Rule = Callable[..., tuple[Tensor, Tensor | None]]
"""A kernel: (query, key, value, g=, beta=, initial_state=, output_final_state=, ...) to (output,
final state)."""

CHUNK = 64
"""Tokens between the states that fla's kernels hold."""


@dataclass(frozen=True)
class DeltaRule:
    """The recurrence of one layer over this rank's tokens."""

    rule: Rule
    inputs: tuple[Tensor, ...]
    """query, key `[B, L, Hk, K]`, value `[B, L, Hv, V]`, g `[B, L, Hv]` or `[B, L, Hv, K]`, beta
    `[B, L, Hv]`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the kernel."""
    takes_edges: Callable[[], bool] = lambda: False
    """Whether the kernel keeps documents apart whose edges are `cu_seqlens`."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return ()

    @cached_property
    def state_shape(self) -> tuple[int, ...]:
        """`[B, Hv, K, V]`."""
        _, key, value, _, _ = self.inputs
        return (value.shape[0], value.shape[2], key.shape[3], value.shape[3])

    @property
    def map_shape(self) -> tuple[int, ...]:
        """`[B, Hv, K, K]`."""
        return (*self.state_shape[:3], self.state_shape[2])

    @property
    def shape(self) -> RecurrentShape:
        _, key, value, g, _ = self.inputs
        return RecurrentShape(
            kind="delta rule" if g.ndim == 3 else "delta rule by channel",
            num_heads=value.shape[2],
            num_groups=key.shape[2],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            batch=value.shape[0],
            itemsize=value.dtype.itemsize,
        )

    def with_inputs(self, inputs: Sequence[Tensor]) -> "DeltaRule":
        return replace(self, inputs=tuple(inputs))

    def of_heads(self, inputs: Sequence[Tensor], heads: Interval) -> "DeltaRule":
        return self.with_inputs(inputs)  # nothing else is by head

    def run(
        self, slots: Interval, state: Tensor | None, *, ends: bool
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value, g, beta = self._part(slots)
        return self._call(query, key, value, g, beta, state, ends=ends)

    def run_documents(self, edges: Sequence[int]) -> Tensor | None:
        batch, device = self.inputs[0].shape[0], self.inputs[0].device
        slots = Interval(edges[0], edges[-1])
        # fla's kernels take no batch then, and before 0.6 they count with 32 bits from the first
        # document on, where one by one they count within each.
        of_inputs = slots.size * max(prod(x.shape[2:]) for x in self.inputs)
        of_states = slots.size // CHUNK * prod(self.state_shape)
        is_far = max(of_inputs, of_states) > MOST_PLACES
        if batch > 1 or is_far or not self.takes_edges():
            return None
        own = tuple(edge - slots.start for edge in edges)
        given = {"cu_seqlens": _edges(own, device, torch.is_inference_mode_enabled())}
        out, _ = replace(self, options=self.options | given).run(slots, None, ends=False)
        return out

    def map(self, slots: Interval) -> tuple[Tensor, Tensor]:
        """(M, U) in one call: columns of a state don't mix, so those of U start from zero with the
        values, and those of M from the identity without any."""
        query, key, value, g, beta = self._part(slots)
        batch, heads, k_dim, v_dim = self.state_shape
        none = value.new_zeros(*value.shape[:3], k_dim)
        dtype = torch.promote_types(value.dtype, torch.float32)
        eye = torch.eye(k_dim, dtype=dtype, device=value.device).expand(batch, heads, -1, -1)
        start = torch.cat([eye.new_zeros(batch, heads, k_dim, v_dim), eye], dim=3)
        _, end = self._call(query, key, torch.cat([value, none], 3), g, beta, start, ends=True)
        assert end is not None
        u, m = end.split([v_dim, k_dim], dim=3)
        return m, u

    def apply(self, m: Tensor, state: Tensor) -> Tensor:
        return m @ state

    def _part(self, slots: Interval) -> tuple[Tensor, ...]:
        return tuple(tensor[:, slots.start : slots.stop] for tensor in self.inputs)

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None,
        *,
        ends: bool,
    ) -> tuple[Tensor, Tensor | None]:
        given = {"initial_state": state, "output_final_state": ends}
        return self.rule(query, key, value, g=g, beta=beta, **given, **self.options)


@lru_cache(maxsize=32)
def _edges(edges: tuple[int, ...], device: torch.device, in_inference: bool) -> Tensor:
    """`[N + 1]`, int64. The same tensor for all layers, since fla keeps what it makes of one; but
    what it makes in inference mode can't be saved for backward."""
    return torch.tensor(edges, device=device)
