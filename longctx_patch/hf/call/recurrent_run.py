"""One run of a recurrent layer on one rank: its exchanges, and what they are planned to send."""

from torch import Tensor, nn

from longctx_patch.config import LongContextConfig
from longctx_patch.engine.chain.recurrence import Recurrence, run_recurrence
from longctx_patch.engine.chain.run import ChainRun
from longctx_patch.engine.recurrent_heads import checked_heads, run_over_heads
from longctx_patch.engine.ulysses import Resharder
from longctx_patch.hf.call.sharded import ShardedCall
from longctx_patch.hf.model.recurrence import recurrent_layers
from longctx_patch.plans.chain import ChainTraffic
from longctx_patch.plans.recurrent import states_because


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
        """What this rank sends in the exchanges so far, by the plans alone."""
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
