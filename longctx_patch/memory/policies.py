"""Says what a decoder layer keeps for backward: one record for each checkpoint policy.

The config's check, the planner, the command line and the first step's check read these records
instead of comparing names. To add a policy, add its names and its record here, and teach
`longctx_patch.memory.run_layer` to run it if its fields say something new.

Keeping attention costs B * L * H * D numbers of the model's dtype and B * H * L numbers of float32
for each layer. It saves a third of attention's work in forward and backward (DISTFLASHATTN, section
3.3). Under Ulysses, the backward pass then exchanges q, k, v and the output for heads once more,
since a layer keeps only this rank's tokens.

Policies that keep attention may do so for a share of the tokens, those that cost most to compute
again (`longctx_patch.engine.selective`). With a share of 0, `attention` is the same as `full`, and
`offload` is `full` with the layers' inputs on the host.

Recurrences and convolutions run again in the recompute, since what their kernels save for backward
is much larger than attention's results. Policies that keep attention keep what such layers got of
other ranks (`longctx_patch.engine.chain.hand_over`), whose size does not depend on the length of
the row, so that a recompute waits for no other rank's kernel.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

LayerPolicy = Literal["none", "full", "attention", "offload"]
"""Names of the policies that one layer can have."""
CheckpointPolicy = Literal["none", "full", "attention", "offload", "auto"]
"""Names of the policies that a config can have for all layers."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Says what layers keep under one policy. Where a policy chooses by layer, its flags say what a
    layer under it may do."""

    name: CheckpointPolicy
    rungs: tuple[LayerPolicy, ...]
    """What one layer may be given: this policy alone, or several from which each layer gets one,
    from the cheapest in memory to the cheapest in time."""
    recomputes_layer: bool
    """Backward runs the layer's forward pass again, from the layer's input."""
    keeps_attention: bool = False
    """Attention's output and lse are kept, so that the recompute runs neither attention's kernel
    nor its communication. `attention_kept` says for which share of the tokens. What a recurrent
    layer receives from other ranks is kept too: all of it, if the share is above 0."""
    on_host: bool = False
    """What the layer keeps (its input, and attention's output and lse) is copied to pinned host
    memory during forward, and comes back in backward while the layer after it is computed
    (`longctx_patch.memory.offload`). Where the host has no room, a policy for all layers raises
    HostMemoryFull; one that chooses by layer keeps the rest on the device."""
    action: str = ""
    """What layers do under it, as the predicate of a sentence."""
    summary: str
    """What the run folder of `longctx patch` says about it."""

    def replays(self, share: float) -> bool:
        """Says whether a layer's recompute is given what forward kept
        (`longctx_patch.memory.replay`), if attention is to be kept for a share of the tokens."""
        return self.keeps_attention and share > 0

    @property
    def chooses_by_layer(self) -> bool:
        """Says whether layers climb from rung to rung (`longctx_patch.memory.auto`)."""
        return len(self.rungs) > 1


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy(
                name="none",
                rungs=("none",),
                recomputes_layer=False,
                action="recompute nothing",
                summary="all activations are kept: fastest, most memory",
            ),
            Policy(
                name="full",
                rungs=("full",),
                recomputes_layer=True,
                action="recompute everything",
                summary="each layer is recomputed, attention and its communication too: least "
                "memory",
            ),
            Policy(
                name="attention",
                rungs=("attention",),
                recomputes_layer=True,
                keeps_attention=True,
                action="recompute all but attention",
                summary="each layer is recomputed except attention, which does not run twice",
            ),
            Policy(
                name="offload",
                rungs=("offload",),
                recomputes_layer=True,
                keeps_attention=True,
                on_host=True,
                action="recompute all but attention from host memory",
                summary="as attention, and what layers keep is in host memory until backward",
            ),
            Policy(
                name="auto",
                rungs=("offload", "attention", "none"),
                recomputes_layer=True,
                keeps_attention=True,
                on_host=True,
                summary="none, attention or offload by layer, as the GPU's memory demands (CPU: "
                "attention)",
            ),
        )
    }
)
"""Every policy, by its name."""


def names_that_keep_attention() -> list[str]:
    """Names of the policies for which `attention_kept` means something."""
    return [policy.name for policy in POLICIES.values() if policy.keeps_attention]


def count_on_host(policies: Iterable[LayerPolicy]) -> int:
    """Counts the layers that offload to the host what they keep."""
    return sum(POLICIES[policy].on_host for policy in policies)


def count_recomputed(policies: Iterable[LayerPolicy]) -> int:
    """Counts the layers that run again in backward."""
    return sum(POLICIES[policy].recomputes_layer for policy in policies)


def describe_layers(policies: Iterable[LayerPolicy]) -> str:
    """Describes what the layers of a model do, as a sentence without its stop.

    Example:
        >>> describe_layers(["attention", "none", "none"])
        '1 of 3 layers recompute all but attention, 2 recompute nothing'
    """
    counts = Counter(policies)
    parts = [f"{count} {POLICIES[policy].action}" for policy, count in counts.items()]
    return ", ".join(parts).replace(" ", f" of {counts.total()} layers ", 1)
