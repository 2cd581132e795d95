"""Proof, on the first training step, that attention and recurrences crossed the ranks.

Patches of other libraries have failed silently: after a rewritten dispatch key or a hook that no
longer fires, every rank trains on attention within its own shard, and losses look plausible. So on
the first sharded training step ranks meet before every layer in which tokens meet, each must run
its plan once, and the traffic must be what the plans predict, to the byte. Backward is checked when
the next sharded pass begins.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx_patch.engine.call import AttentionCall
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.planned_traffic import predicted_traffic
from longctx_patch.engine.selective import selection_of
from longctx_patch.hf.call.token_probe import TokenProbe
from longctx_patch.hf.layers.checkpointing import LayerCheckpoints
from longctx_patch.hf.model import transformers_api
from longctx_patch.memory.policies import POLICIES, LayerPolicy
from longctx_patch.plans import Traffic
from longctx_patch.plans.chain import ChainTraffic
from longctx_patch.transport.meeting import Meeting, SequenceParallelismError, meet

_END = -1


class PlannedTraffic(NamedTuple):
    """Counts what one rank sends for one layer."""

    forward: Traffic
    recompute: Traffic
    """What each run of the layer after the first sends."""
    backward: Traffic


class FireCheck:
    """Watches one step of one model."""

    def __init__(
        self,
        group: SequenceGroup,
        layers: Sequence[tuple[nn.Module, LayerPolicy]],
        share: float,
        probe: TokenProbe,
    ) -> None:
        """`layers` are the modules in which tokens meet, with the policies they run under; `share`
        is the part of the tokens whose attention is kept by layers that keep it; `probe` tries the
        other modules in the meantime."""
        self.has_run_forward = False
        self._policies = [policy for _, policy in layers]
        self._share, self.probe = share, probe
        self._group = group
        self._numbers = {id(layer): number for number, (layer, _) in enumerate(layers)}
        self._before = self._sent()
        self._runs: Counter[int] = Counter()  # by number of the layer
        self._backward: Counter[int] = Counter()
        self._finished: Counter[int] = Counter()
        self._inputs_train: set[int] = set()
        self._traffic: dict[int, PlannedTraffic] = {}
        self._masks: list[str] = []
        self._recurrent: set[int] = set()

    def __repr__(self) -> str:
        """Returns what ran and what this rank sent, in a line."""
        forward, backward = self.planned_forward(), self.planned_backward()
        kernels = ", ".join(self._group.kernels.names)  # none on the CPU
        says = [
            f"{len(self._runs)} of {len(self._numbers)} {self._layers()} over "
            f"{self._group.num_ranks} rank(s), mask: {self.masks}"
            + f", kernels: {kernels}"
            * bool(kernels),
            f"rank {self._group.group_rank} sent {forward} in forward, as planned"
            if self.has_run_forward
            else "forward has not ended",
            f"{backward} planned for backward" if self._backward else "no backward yet",
        ]
        return f"<first step: {'; '.join(says)}>"

    def _layers(self) -> str:
        """Names the kinds of layers in which tokens meet; a decoder layer may have two."""
        recurrent = len(self._recurrent)
        if not recurrent:
            return "layers"
        return f"layers ({len(self._traffic) - recurrent} with attention, {recurrent} recurrent)"

    @property
    def masks(self) -> str:
        """Who sees whom, in each kind of layer that ran, and whether latents travel."""
        return " + ".join(dict.fromkeys(self._masks))

    def layer_begins(self, module: nn.Module) -> None:
        """Count a run of a layer. Collective in forward: all ranks must come to the same layer."""
        layer = self._numbers[id(module)]
        if not self.has_run_forward:
            self._meet(layer)
        # Not at its end, which a recompute that has all it needs does not reach.
        self._runs[layer] += 1

    def layer_ran(
        self,
        module: nn.Module,
        calls: Sequence[AttentionCall],
        q: Tensor,
        out: Tensor,
        *,
        has_sinks: bool,
    ) -> None:
        """Note a layer's calls with queries `[B, L, H, D]`, and their backward when that runs."""
        call = calls[0]
        softcap = [f"softcap {call.score.softcap:g}"] if call.score.softcap else []
        latents = ["latents travel"] * bool(call.shape.latent_dim)
        masks = " beside ".join(each.mask.name for each in calls)
        words = ", ".join([masks, *softcap, *["sinks"] * has_sinks, *latents])

        def planned(layer: int) -> PlannedTraffic:
            found = [self._planned(layer, each) for each in calls]
            return PlannedTraffic(*(sum(each, Traffic()) for each in zip(*found, strict=True)))

        self._ran(module, planned, words, q, out)

    def recurrence_ran(
        self, module: nn.Module, planned: ChainTraffic, hidden: Tensor, out: Tensor, words: str
    ) -> None:
        """The same for a recurrent layer; `words` say what it exchanged."""
        self._recurrent.add(self._numbers[id(module)])

        def traffic(layer: int) -> PlannedTraffic:
            recompute = planned.replay if self._replays(layer) else planned.forward
            return PlannedTraffic(planned.forward, recompute, planned.backward)

        self._ran(module, traffic, words, hidden, out)

    def _ran(
        self,
        module: nn.Module,
        planned: Callable[[int], PlannedTraffic],
        words: str,
        first: Tensor,
        out: Tensor,
    ) -> None:
        """Note what a layer's first run sends, from its `first` input to its output."""
        layer = self._numbers[id(module)]
        if layer in self._traffic:  # a recompute: its backward is that of the first run
            return
        self._masks.append(words)
        self._traffic[layer] = planned(layer)
        if out.requires_grad:
            out.register_hook(lambda _: self._backward.update([layer]))
        if first.requires_grad:
            self._inputs_train.add(layer)
            first.register_hook(lambda _: self._finished.update([layer]))

    def check_forward(self) -> None:
        """Check the forward pass when it is over. Collective: all ranks raise if one does."""
        problem = self._missing_layers()
        problem = problem or self._wrong_traffic("forward", self.planned_forward())
        problem = self.probe.end() or problem
        self._meet(_END, problem)
        self.has_run_forward = True
        self._before = self._sent()

    def backward_problem(self) -> str | None:
        """Says what was wrong with backward, asked when the next forward pass begins; None if
        nothing. A step without a whole backward proves nothing."""
        if not self._backward or self._was_interrupted():
            return None
        return self._wrong_traffic("backward", self.planned_backward())

    def _was_interrupted(self) -> bool:
        """Says whether a layer's backward began and did not end: out of memory, say."""
        return any(self._finished[layer] < self._backward[layer] for layer in self._inputs_train)

    def planned_forward(self) -> Traffic:
        """Returns what this rank sends in forward."""
        return sum((traffic.forward for traffic in self._traffic.values()), Traffic())

    def planned_backward(self) -> Traffic:
        """Returns what this rank sends for the layers that have run backward or been recomputed.

        Layers below all trained parameters have neither.
        """
        planned = Traffic()
        for layer, traffic in self._traffic.items():
            recomputed = [traffic.recompute] * (self._runs[layer] - 1)
            planned = sum(recomputed + [traffic.backward] * self._backward[layer], planned)
        return planned

    def _replays(self, layer: int) -> bool:
        return POLICIES[self._policies[layer]].replays(self._share)

    def _planned(self, layer: int, call: AttentionCall) -> PlannedTraffic:
        all_of_it = predicted_traffic(call)
        if not self._replays(layer):
            return PlannedTraffic(all_of_it.forward, all_of_it.forward, all_of_it.backward)
        selection = selection_of(call, self._share)
        if selection is None:
            return PlannedTraffic(all_of_it.forward, Traffic(), all_of_it.backward_after_replay)
        early = predicted_traffic(selection.early)
        return PlannedTraffic(all_of_it.forward, early.forward, all_of_it.backward)

    def _missing_layers(self) -> str | None:
        wrong = [
            f"layer {n}: {self._runs[n]}" for n in self._numbers.values() if self._runs[n] != 1
        ]
        if not wrong:
            return None
        return f"layers that did not run their plan exactly once: {', '.join(wrong)}"

    def _wrong_traffic(self, direction: str, planned: Traffic) -> str | None:
        now = self._sent()
        messages, num_bytes = now.messages - self._before.messages, now.bytes - self._before.bytes
        if (messages, num_bytes) == (planned.messages, planned.bytes):
            return None
        return f"{direction} sent {Traffic(messages, num_bytes)}, its plans predict {planned}"

    def _sent(self) -> Traffic:
        return Traffic(*self._group.counters.sent_ever())

    def _meet(self, place: int, problem: str | None = None) -> None:
        """Raise on every rank unless all are at the same place and none has a problem."""
        wrong = None if problem is None else SequenceParallelismError(problem)
        places = [at for (at,) in meet(self._group.everyone, Meeting.LAYER, (place,), wrong)]
        if set(places) != {place}:
            there = ", ".join(
                f"rank {rank} {'at the end' if at == _END else f'at layer {at}'}"
                for rank, at in enumerate(places)
            )
            raise SequenceParallelismError(
                f"the ranks of the group are at different places: {there}"
            )


@dataclass
class FirstStep:
    """Says when the first training step of a model is checked, and holds the result."""

    model: PreTrainedModel
    group: SequenceGroup
    checkpoints: LayerCheckpoints
    check: FireCheck | None = None
    """The check of the first sharded training pass, or of the last try if it failed."""
    _is_over: bool = False
    _forwards: list[tuple[nn.Module, object]] = field(default_factory=list)

    def note_forwards(self) -> None:
        """Take the forwards that recurrent layers have now for those that cross the ranks: they
        were just bound, or a checked step begins with them."""
        mixers = transformers_api.recurrent_modules(self.model)
        self._forwards = [(mixer, vars(mixer).get("forward")) for mixer in mixers]

    def is_due(self, decoder: nn.Module) -> bool:
        """Says whether the next sharded pass is checked."""
        done = self.check is not None and self.check.has_run_forward
        done = done or self.checkpoints.is_rehearsed
        return not done and decoder.training and torch.is_grad_enabled()

    def begin(self, decoder: nn.Module) -> FireCheck | None:
        if not self.is_due(decoder):
            return None
        policies = self.checkpoints.policies
        layers = [
            (module, policies[number])
            for module, number in transformers_api.mixing_modules(self.model)
        ]
        if self.check is not None:  # of a try that failed
            self.check.probe.end()
        probe = TokenProbe.of(self.model) if self.group.num_ranks > 1 else TokenProbe()
        self.check = FireCheck(self.group, layers, self.checkpoints.share, probe)
        self.note_forwards()
        return self.check

    def misfire(self, decoder: nn.Module) -> str | None:
        """Says what went wrong since the first step: the model's attention or a recurrent layer's
        forward was replaced, or the first backward sent other traffic than planned."""
        found = transformers_api.attention_implementation(self.model)
        if found not in transformers_api.NAME_OVER_STOCK.values():
            return f"the model's attention is {found!r} now"
        if not self.is_due(decoder) and (replaced := self._replaced_forward()) is not None:
            return replaced
        if self.check is None or self._is_over or not self.check.has_run_forward:
            return None
        self._is_over = True
        return self.check.backward_problem()

    def _replaced_forward(self) -> str | None:
        for number, (mixer, forward) in enumerate(self._forwards):
            if (now := vars(mixer).get("forward")) is not forward:
                return (
                    f"the forward of {type(mixer).__name__}, recurrent layer {number}, is "
                    f"{'that of its class' if now is None else repr(now)} now"
                )
        return None
