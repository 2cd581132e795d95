"""Proof, on the first training step, that attention crossed the ranks.

Patches of other libraries have failed silently: a dispatch key rewritten, a hook that no longer
fires, and every rank trains on attention within its own shard, with losses that look plausible. So
the first sharded training step counts: every attention layer must have run its plan once, and what
was sent must be what the plans predict, to the byte. Backward is checked when the next step begins.
"""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from longctx_patch.call import AttentionCall, CallTraffic
from longctx_patch.groups import SequenceGroup
from longctx_patch.plans import Traffic


class SequenceParallelismError(RuntimeError):
    """Attention did not run as it was planned."""


class FireCheck:
    """Watches one step of one model; `layers` are its attention modules."""

    def __init__(self, group: SequenceGroup, layers: Sequence[nn.Module]) -> None:
        self._group = group
        self._layers = layers
        self._before = self._sent()
        self._forward: Counter[int] = Counter()  # by id of the module
        self._backward: Counter[int] = Counter()
        self._traffic: dict[int, CallTraffic] = {}
        self._masks: list[str] = []

    @property
    def masks(self) -> str:
        """Who sees whom, of all kinds of layers that ran."""
        return " + ".join(dict.fromkeys(self._masks))

    def layer_ran(
        self,
        module: nn.Module,
        call: AttentionCall,
        q: Tensor,
        out: Tensor,
        *,
        has_sinks: bool,
    ) -> None:
        """Note a layer's call with queries `[B, L, H, D]`, and its backward when it comes."""
        batch, _, _, head_dim = q.shape
        softcap = [f"softcap {call.score.softcap:g}"] if call.score.softcap else []
        self._masks.append(", ".join([call.mask.name, *softcap, *["sinks"] * has_sinks]))
        self._forward[id(module)] += 1
        self._traffic[id(module)] = call.predicted_traffic(batch, head_dim, q.dtype.itemsize)
        if out.requires_grad:
            out.register_hook(lambda _: self._backward.update([id(module)]))

    def check_forward(self) -> None:
        """After the decoder's forward pass; collective, raises on every rank if on one."""
        problem = self._missing_layers()
        problem = problem or self._wrong_traffic("forward", self.planned_forward())
        self._before = self._sent()
        self._raise_together(problem)

    def check_backward(self) -> None:
        """When the next forward pass begins; a step without backward proves nothing."""
        problem = self._wrong_traffic("backward", self.planned_backward())
        self._raise_together(problem if self._backward else None)

    def planned_forward(self) -> Traffic:
        """What this rank sends in forward."""
        return sum((traffic.forward for traffic in self._traffic.values()), Traffic())

    def planned_backward(self) -> Traffic:
        """What this rank sends for the layers that have run backward, recompute included.

        Layers below all that is trained have none.
        """
        planned = Traffic()
        for layer, times in self._backward.items():
            traffic = self._traffic[layer]
            policy = self._group.config.checkpoint
            once = traffic.backward_after_replay if policy == "attention" else traffic.backward
            again = [traffic.forward] if policy == "full" else []
            planned = sum([once] * times + again, planned)
        return planned

    def _missing_layers(self) -> str | None:
        runs = {layer: self._forward[id(layer)] for layer in self._layers}
        wrong = [
            f"layer {getattr(layer, 'layer_idx', '?')}: {n}" for layer, n in runs.items() if n != 1
        ]
        if not wrong:
            return None
        return f"attention layers that did not run their plan exactly once: {', '.join(wrong)}"

    def _wrong_traffic(self, direction: str, planned: Traffic) -> str | None:
        now = self._sent()
        messages, num_bytes = now.messages - self._before.messages, now.bytes - self._before.bytes
        if (messages, num_bytes) == (planned.messages, planned.bytes):
            return None
        return (
            f"{direction} sent {messages} messages of {num_bytes} bytes, its plans say "
            f"{planned.messages} of {planned.bytes}"
        )

    def _sent(self) -> Traffic:
        counters = self._group.counters
        return Traffic(counters.messages, counters.bytes)

    def _raise_together(self, problem: str | None) -> None:
        everyone = self._group.everyone.all_gather_numbers([int(problem is not None)])
        wrong = [rank for rank, (failed,) in enumerate(everyone) if failed]
        if wrong:
            raise SequenceParallelismError(
                f"sequence parallelism did not run as planned on ranks {wrong} of the group: "
                f"{problem or 'see their errors'}. Something replaced the patched attention after "
                "patch() (set_attn_implementation, another patch, a compiled graph)? Patch last."
            )
