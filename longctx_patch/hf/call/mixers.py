"""Recurrent layers of a patched model: their forward with exchanges between its segments.

transformers writes each such layer's forward around functions of its module: a short convolution,
and a recurrence (with kernels of fla, mamba-ssm and causal-conv1d where those are installed). A
patched layer runs the forward of its own class, but with these names standing for functions that
run the same ones over the segments of a chain. Neither the class nor the module is changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from longctx_patch.config import LongContextConfig
from longctx_patch.engine.chain.chain_run import ChainRun
from longctx_patch.engine.chain.convolution import in_a_row, in_pieces, run_convolution
from longctx_patch.engine.chain.delta_rule import DeltaRule
from longctx_patch.engine.chain.recurrence import Recurrence, run_recurrence
from longctx_patch.engine.chain.state_space import StateSpace
from longctx_patch.engine.recurrent_heads import checked_heads, run_over_heads
from longctx_patch.engine.ulysses import Resharder
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.hf.call.kernel_faults import check_faults
from longctx_patch.hf.call.mixer_kernels import check_kernels
from longctx_patch.hf.call.sharded import ShardedCall
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import kernel_takes, runs_kernel, with_names
from longctx_patch.hf.model.transformers_api import CALL_KEY
from longctx_patch.plans.chain import ChainTraffic
from longctx_patch.plans.recurrent import states_because

Function = Callable[..., Any]


class RecurrentRun:
    """Its convolutions run over a chain of all ranks. So does its recurrence; or heads are
    exchanged for it, and the chain is that of the ring."""

    def __init__(self, call: ShardedCall) -> None:
        self.over_all = ChainRun(call.chain, call.group.everyone)
        self.words = "recurrent"
        """What ran, for the first step's report."""
        self._call = call
        self._of_heads = ChainTraffic()

    @property
    def planned(self) -> ChainTraffic:
        """Returns what this rank sends in the exchanges so far, by the plans alone."""
        return self.over_all.planned.plus(self._of_heads)

    def recurrence(self, recurrence: Recurrence) -> Tensor:
        """The output `[B, L, ...]` for this rank's tokens. Collective."""
        call, shape = self._call, recurrence.shape
        if call.recurrent_way(shape) == "states":
            return run_recurrence(self.over_all, recurrence)
        self.words = "recurrent with heads exchanged"
        group = call.group
        layout = group.layout(call.documents)
        split = checked_heads(shape.num_heads, shape.num_groups, layout, call.ring_layout)
        first = group.group_rank - group.ulysses.group_rank
        sizes = layout.sizes[first : first + split.degree]
        ring = ChainRun(call.ring_chain, group.ring)
        out, exchanged = run_over_heads(ring, Resharder(group.ulysses, split, sizes), recurrence)
        self._of_heads = self._of_heads.plus(exchanged).plus(ring.planned)
        return out


def check_exchange(model: nn.Module, config: LongContextConfig) -> None:
    """Raise ValueError where heads are to be exchanged that the model hasn't, or that don't
    divide."""
    if config.recurrent_exchange != "heads":
        return
    layers = recurrent_layers(model.config)
    shape = None if layers is None else layers.recurrence
    why: str | None = f"{type(model).__name__} has no recurrence"
    if shape is not None:
        why = states_because(shape.num_heads, shape.num_groups, config.ulysses_degree)
    if why is not None:
        raise ValueError(f"recurrent_exchange='heads': {why}. Use recurrent_exchange='auto'.")


def _convolution(
    stock: Function, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    run: RecurrentRun = options.pop(CALL_KEY)
    reach = weight.shape[-1] - 1

    def convolve(hidden_BCL: Tensor, before_BCR: Tensor | None) -> Tensor:
        found: Tensor
        if before_BCR is None:
            found = stock(hidden_BCL, weight, bias, **options)
        elif hidden_BCL.shape[2] > reach and kernel_takes(stock, "initial_states"):
            own, before = in_a_row([hidden_BCL]), in_a_row([before_BCR])
            found = stock(own, weight, bias, initial_states=before, **options)
        else:
            joined = in_a_row([before_BCR, hidden_BCL])
            found = stock(joined, weight, bias, **options)[:, :, reach:]
        return found

    counted = in_pieces(convolve, reach) if runs_kernel(stock) else convolve
    return run_convolution(run.over_all, counted, hidden, reach)


def _delta_rule(
    stock: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    run: RecurrentRun = options.pop(CALL_KEY)
    takes_edges = partial(kernel_takes, stock, "cu_seqlens")
    rule = DeltaRule(stock, (query, key, value, g, beta), options, takes_edges)
    return run.recurrence(rule), None


def _state_space(
    stock: Function,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    initial_states: None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Tensor:
    run: RecurrentRun = options.pop(CALL_KEY)
    is_kernel = partial(kernel_takes, stock, "seq_idx")
    return run.recurrence(StateSpace(stock, (x, dt, b, c), a, options, is_kernel))


def _not_fused(stock: Function, *_: Any, **__: Any) -> None:
    """A layer's convolution and scan in one call, which gives no place for an exchange: layers run
    them one by one where it returns None."""


OVER_CHAIN: Mapping[str, Function] = MappingProxyType(
    {
        "causal_conv1d_fn": _convolution,
        "torch_chunk_gated_delta_rule": _delta_rule,
        "chunk_kimi_delta_attention": _delta_rule,
        "mamba2_chunk_scan": _state_space,
        "mamba2_split_conv1d_scan_combined": _not_fused,
    }
)
"""What stands for each of transformers' functions along the sequence, called with it first."""


@dataclass(eq=False)
class MixerForward:
    """Takes the place of a recurrent layer's forward; it refers to no other module."""

    module: nn.Module
    over_chain: Function
    """The forward of its class, with functions over a chain."""

    # Plans and messages can't be traced.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = kwargs.get(CALL_KEY)
        if call is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        check = call.fire_check
        if check is not None:
            check.layer_begins(self.module)
        run = RecurrentRun(call)
        out = self.over_chain(self.module, *args, **(kwargs | {CALL_KEY: run}))
        if check is not None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            check.recurrence_ran(self.module, run.planned, hidden, out, run.words)
        return out


def check_mixers(model: nn.Module, config: LongContextConfig, mask: object) -> None:
    """Raise ValueError for recurrent layers that can't run over chains here.

    On a GPU their kernels are needed, unless `config.torch_recurrence` says that torch will do, and
    those that are installed must take the layers' sizes.
    """
    mixers = transformers_api.recurrent_modules(model)
    if mixers and mask is not None:
        raise ValueError(
            f"a mask with {type(mixers[0]).__name__}: a recurrence sees all tokens before each of "
            "its document, whatever a mask says. Leave the mask out."
        )
    for mixer in mixers:
        if not transformers_api.takes_options(type(mixer)):
            raise ValueError(
                f"{type(mixer).__name__} of the installed transformers does not take the options "
                "of its decoder's call. pip install 'transformers>=5.22'."
            )
        if "forward" in vars(mixer):
            raise ValueError(
                f"the forward of {type(mixer).__name__} was replaced by {mixer.forward!r}: the "
                "patch runs the forward of its class. Patch first."
            )
    check_exchange(model, config)
    on_gpu = any(weight.is_cuda for mixer in mixers for weight in mixer.parameters())
    if on_gpu:
        check_kernels(mixers, torch_will_do=config.torch_recurrence)
        check_faults(mixers)


def bind_mixers(model: nn.Module) -> Callable[[], None]:
    """Run the recurrent layers of a model over chains; return a function that undoes it."""
    mixers = transformers_api.recurrent_modules(model)
    for mixer in mixers:
        vars(mixer)["forward"] = MixerForward(mixer, _over_chain(type(mixer)))

    def restore() -> None:
        for mixer in mixers:
            vars(mixer).pop("forward", None)

    return restore


def _over_chain(cls: type[nn.Module]) -> Function:
    """The forward of a class, with functions of `OVER_CHAIN` for those that they stand for."""
    forward = transformers_api.code_of(cls)
    stock = forward.__globals__
    over_chain = {
        name: partial(function, stock[name])
        for name, function in OVER_CHAIN.items()
        if name in stock
    }
    return with_names(forward, over_chain)
