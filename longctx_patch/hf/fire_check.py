"""Proof, on the first training step, that attention crossed the ranks.

Patches of other libraries have failed silently: a dispatch key rewritten, a hook that no longer
fires, and every rank trains on attention within its own shard, with losses that look plausible. So
on the first sharded training step ranks meet before every attention layer, each layer must have run
its plan once, and what was sent must be what the plans predict, to the byte. Backward is checked
when the next sharded pass begins.
"""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from longctx_patch.call import AttentionCall, CallTraffic
from longctx_patch.groups import SequenceGroup
from longctx_patch.plans import Traffic

_END = -1


class SequenceParallelismError(RuntimeError):
    """Attention did not run as it was planned."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"sequence parallelism did not run as planned: {problem}. Something replaced the "
            "patched attention after patch() (set_attn_implementation, another patch, a compiled "
            "graph)? Patch last, or handle.unpatch() and patch again."
        )


class FireCheck:
    """Watches one step of one model; `layers` are its attention modules."""

    def __init__(self, group: SequenceGroup, layers: Sequence[nn.Module]) -> None:
        self.has_run_forward = False
        self._group = group
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        self._before = self._sent()
        self._runs: Counter[int] = Counter()  # by number of the layer
        self._backward: Counter[int] = Counter()
        self._traffic: dict[int, CallTraffic] = {}
        self._masks: list[str] = []

    @property
    def masks(self) -> str:
        """Who sees whom, of all kinds of layers that ran."""
        return " + ".join(dict.fromkeys(self._masks))

    def layer_begins(self, module: nn.Module) -> None:
        """Collective in forward: all ranks must come to the same layer."""
        if not self.has_run_forward:
            self._meet(self._numbers[id(module)])

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
        layer, (batch, _, _, head_dim) = self._numbers[id(module)], q.shape
        self._runs[layer] += 1
        if layer in self._traffic:  # a recompute: its backward is that of the first run
            return
        softcap = [f"softcap {call.score.softcap:g}"] if call.score.softcap else []
        self._masks.append(", ".join([call.mask.name, *softcap, *["sinks"] * has_sinks]))
        self._traffic[layer] = call.predicted_traffic(batch, head_dim, q.dtype.itemsize)
        if out.requires_grad:
            out.register_hook(lambda _: self._backward.update([layer]))

    def check_forward(self) -> None:
        """After the decoder's forward pass; collective, raises on every rank if on one."""
        problem = self._missing_layers()
        problem = problem or self._wrong_traffic("forward", self.planned_forward())
        self._meet(_END, problem)
        self.has_run_forward = True
        self._before = self._sent()

    def backward_problem(self) -> str | None:
        """When the next forward pass begins; a step without backward proves nothing."""
        if not self._backward:
            return None
        return self._wrong_traffic("backward", self.planned_backward())

    def planned_forward(self) -> Traffic:
        """What this rank sends in forward."""
        return sum((traffic.forward for traffic in self._traffic.values()), Traffic())

    def planned_backward(self) -> Traffic:
        """What this rank sends for the layers that have run backward or been recomputed.

        Layers below all that is trained have neither.
        """
        replays = self._group.config.checkpoint == "attention"
        planned = Traffic()
        for layer, traffic in self._traffic.items():
            recomputed = [] if replays else [traffic.forward] * (self._runs[layer] - 1)
            once = traffic.backward_after_replay if replays else traffic.backward
            planned = sum(recomputed + [once] * self._backward[layer], planned)
        return planned

    def _missing_layers(self) -> str | None:
        wrong = [
            f"layer {n}: {self._runs[n]}" for n in self._numbers.values() if self._runs[n] != 1
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
        return Traffic(*self._group.counters.sent_ever())

    def _meet(self, place: int, problem: str | None = None) -> None:
        """Raise on every rank unless all are at one place, and none has a problem."""
        mine = (place, int(problem is not None))
        everyone = self._group.everyone.all_gather_numbers(mine)
        if set(everyone) == {(place, 0)}:
            return
        there = ", ".join(
            f"rank {rank} {'at the end' if at == _END else f'at layer {at}'}"
            for rank, (at, _) in enumerate(everyone)
        )
        raise SequenceParallelismError(problem or f"the ranks of the group stand {there}")
