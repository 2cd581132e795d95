"""Checkpoint policies on the decoder layers of one patched model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx_patch.hf.model import transformers_api
from longctx_patch.memory.auto import AutoPolicy
from longctx_patch.memory.ladder import MemoryUse, Pass, Rehearsed
from longctx_patch.memory.meter import Meter, meter_of
from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.policies import (
    POLICIES,
    CheckpointPolicy,
    LayerPolicy,
    Policy,
    count_on_host,
    count_recomputed,
    describe_layers,
)
from longctx_patch.memory.run_layer import run_layer


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Says what the decoder's layers keep for backward, on this rank."""

    policies: tuple[LayerPolicy, ...]
    """Policy of each layer, first to last, in the last training pass or rehearsal."""
    memory: MemoryUse | None
    """What `auto` has measured and decides by; None before its first pass or a rehearsal, on CPU,
    and under the other policies."""
    host_bytes: int
    """Bytes of this process's host memory that hold what layers offload."""

    def __str__(self) -> str:
        return describe_layers(self.policies)

    @property
    def num_whole_layers(self) -> int:
        """The number of layers that are not recomputed."""
        return len(self.policies) - count_recomputed(self.policies)

    @property
    def num_offloaded_layers(self) -> int:
        """The number of layers that keep nothing on the device."""
        return count_on_host(self.policies)


GRADIENTS_IN_EVALUATION = (
    "gradients in evaluation mode: from_pretrained returns a model in this mode, in which no layer "
    "would be checkpointed and the proof of the first training step would be left out. Call "
    "model.train() to train; evaluate under torch.no_grad()."
)
"""Why a sharded pass in evaluation mode is refused where a loss or its backward asks for gradients.
Passes without a backward stay allowed, even with gradients enabled."""

MOST_KINDS = 3
"""A model with more kinds of layers (adapters of different ranks, say) is treated as having one."""


class LayerCheckpoints:
    """Runs each decoder layer of a model under a policy of its own.

    Policies change as a training pass begins and at no other time; a graph that exists already
    keeps the policies it was made under. All ranks of a group must run the same policies, since
    what backward sends depends on them. Data-parallel replicas need not, since the collectives of
    DDP and FSDP2 are the same whatever is recomputed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: CheckpointPolicy,
        share: float = 1.0,
        find_meter: Callable[[torch.device], Meter | None] = meter_of,
    ) -> None:
        """Layers that keep attention keep it for a `share` of the tokens."""
        self.find_meter = find_meter
        self.share = share
        self._layers = transformers_api.decoder_layers(model)
        self._model = model
        self._policy = POLICIES[policy]
        self._fixed = _without_meter(self._policy)
        self._auto: AutoPolicy | None = None
        self._host: HostCopies | None = None
        self._pass: Pass | None = None
        self._num_tokens = 0
        self._run_rehearsed: Callable[..., Any] | None = None
        self._is_evaluation = False
        """Whether the sharded pass that is running is one of evaluation."""
        self._reserved_bytes = 0
        self._trained: tuple[bool, ...] = ()

    @property
    def are_alike(self) -> bool:
        """Says whether all layers keep equally much, as far as that can be told."""
        return len({_kind(layer) for layer in self._layers}) == 1

    def _kinds(self) -> list[object]:
        """One entry for each layer, equal for layers that keep equally much."""
        kinds: list[object] = [_kind(layer) for layer in self._layers]
        # Measuring keeps one layer of each kind whole, so many kinds would take too much memory.
        return kinds if len(set(kinds)) <= MOST_KINDS else [None] * len(kinds)

    def to_rehearse(self, num_layers: int, device: torch.device) -> tuple[LayerPolicy, ...]:
        """Policies under which the last layers show what all layers take.

        Under `auto` this is the policy cheapest in memory, and for the last layer the one cheapest
        in time.
        """
        *_, highest = self._policy.rungs
        return (*[self._lowest(device)] * (num_layers - 1), highest)

    def know(self, device: torch.device, found: Rehearsed) -> None:
        """Give `auto` what a rehearsal has just found, so that it need not measure.

        What `auto` has measured itself is better, and stays.
        """
        if self._auto is not None and self._auto.use is not None:
            return
        self._auto = None  # its first pass may have been interrupted
        auto = self._auto_on(device)
        if auto is not None:
            auto.know(self._num_tokens, found)

    def host_to_rehearse(self, device: torch.device) -> HostCopies:
        """The host memory for a rehearsal.

        A run needs no new room for host memory that it holds already. Under `auto` the rehearsal
        has host memory of its own, so that what it keeps is counted apart from what the run keeps.
        """
        if self._policy.chooses_by_layer or self._host is None:
            return self.new_host(device, pinned=False)
        return self._host

    def new_host(self, device: torch.device, *, pinned: bool = True) -> HostCopies:
        """Host memory for what layers offload. Under `auto`, tensors without room there stay on the
        device."""
        must_leave = not self._policy.chooses_by_layer
        host = HostCopies(
            device, must_leave=must_leave, num_layers=len(self._layers), pinned=pinned
        )
        host.reserved_bytes = self._reserved_bytes
        return host

    def reserve_host(self, num_bytes: int) -> None:
        """Make offloaded layers leave `num_bytes` of the host's memory free."""
        self._reserved_bytes = num_bytes
        if self._host is not None:
            self._host.reserved_bytes = num_bytes

    @property
    def is_rehearsed(self) -> bool:
        return self._run_rehearsed is not None

    @contextmanager
    def rehearsed(self, run: Callable[..., Any]) -> Iterator[None]:
        """Within the context, `run(layer, forward, *args)` runs layers; `auto` decides nothing."""
        give_back = transformers_api.checkpoint_layers(self._model, self._run)
        self._run_rehearsed = run
        try:
            yield
        finally:
            self._run_rehearsed = None
            give_back()

    @property
    def policies(self) -> tuple[LayerPolicy, ...]:
        """Policy of each layer, first to last, in the pass under way or the last one."""
        return self._auto.policies if self._auto else (self._fixed,) * len(self._layers)

    @property
    def replays_attention(self) -> bool:
        """Says whether layers may ask attention for what it computed before."""
        return self._policy.keeps_attention

    def report(self) -> Checkpointing:
        memory = None if self._auto is None else self._auto.use
        host_bytes = 0 if self._host is None else self._host.num_bytes
        return Checkpointing(policies=self.policies, memory=memory, host_bytes=host_bytes)

    def bind(self) -> Callable[[], None]:
        """Take the layers over; return a function that gives them back."""
        if not self._policy.recomputes_layer:
            return lambda: None
        return transformers_api.checkpoint_layers(self._model, self._run)

    def propose(self, decoder: nn.Module, num_tokens: int, device: torch.device) -> int:
        """Returns `AutoPolicy.propose` of the pass that begins, on this rank; 0 without `auto`.

        `num_tokens` are those of all ranks, the same on each.
        """
        self._pass = None  # a pass whose forward was interrupted holds nothing any more
        self._is_evaluation = not decoder.training
        if not self._trains(decoder):
            return 0
        self._num_tokens = num_tokens
        if not self._counts(decoder):
            return 0
        auto = self._auto_on(device)
        return auto.propose(self._num_tokens) if auto else 0

    def begin(self, decoder: nn.Module, agreed: int) -> None:
        """Begin the pass with the least of what the ranks of the group proposed."""
        if self._auto is not None and self._counts(decoder):
            self._pass = self._auto.begin(self._num_tokens, agreed)

    def end(self, decoder: nn.Module, hidden: Tensor) -> None:
        """Note that the decoder's forward is over. A training pass is over when its backward is.

        Backward of a sharded pass in evaluation mode raises ValueError.
        """
        is_evaluation, self._is_evaluation = self._is_evaluation, False
        if is_evaluation and hidden.requires_grad:
            hidden.register_hook(_refuse_backward)
        this, self._pass = self._pass, None
        auto = self._auto
        if auto is None or this is None or not (self._counts(decoder) and hidden.requires_grad):
            return

        def backward_begins(_: Tensor) -> None:
            # Queued, as in DDP and FSDP, to run after the last gradient.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: auto.end(this))

        hidden.register_hook(backward_begins)

    def _auto_on(self, device: torch.device) -> AutoPolicy | None:
        """The policy `auto` on this device; None where memory is not counted."""
        trained = _who_is_trained(self._model)
        if self._trained not in ((), trained):  # layers keep other tensors then
            self._auto = None
        self._trained = trained
        if self._auto is None and (meter := self.find_meter(device)) is not None:
            if POLICIES[self._lowest(device)].on_host:
                self._host = self._host or self.new_host(device)
            self._auto = AutoPolicy(meter, self._kinds(), self._host, self.share)
        return self._auto

    def _lowest(self, device: torch.device) -> LayerPolicy:
        """The cheapest policy in memory that a layer may have on this device."""
        return self._policy.rungs[0] if device.type == "cuda" else _without_meter(self._policy)

    def _counts(self, decoder: nn.Module) -> bool:
        """Says whether `auto` chooses policies, and this is a training pass, not a rehearsal."""
        return self._policy.chooses_by_layer and self._trains(decoder) and not self.is_rehearsed

    @staticmethod
    def _trains(decoder: nn.Module) -> bool:
        return decoder.training and torch.is_grad_enabled()

    def _run(self, layer: int, forward: Callable[..., Any], *args: Any) -> Any:
        if self._run_rehearsed is not None:
            return self._run_rehearsed(layer, forward, *args)
        if POLICIES[self._fixed].on_host:
            self._host = self._host or self.new_host(args[0].device)
        if self._auto is None:
            return run_layer(self._fixed, forward, *args, host=self._host, share=self.share)
        return self._auto.run(layer, forward, *args)


def _refuse_backward(_: Tensor) -> None:
    raise ValueError(GRADIENTS_IN_EVALUATION)


def _without_meter(policy: Policy) -> LayerPolicy:
    """The policy of each layer where memory is not counted. A CPU's memory is the host's, so a
    layer there offloads only if the policy has no other rung."""
    return next((rung for rung in policy.rungs if not POLICIES[rung].on_host), policy.rungs[0])


def _who_is_trained(model: nn.Module) -> tuple[bool, ...]:
    """Says of each parameter whether it is trained. `nn.Module.parameters` goes back to the top for
    each module: with adapters on 36 layers it held up each step by 17 ms."""
    modules = [model]
    for module in modules:  # which grows
        modules.extend(child for child in module._modules.values() if child is not None)
    weights = (weight for module in modules for weight in module._parameters.values())
    return tuple(weight.requires_grad for weight in weights if weight is not None)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """A key that is equal for layers that keep equally much, by their modules and parameters."""
    named = layer.named_parameters()
    return (type(layer), *((name, tuple(p.shape), p.requires_grad) for name, p in named))
