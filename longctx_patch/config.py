"""What a user decides about sequence parallelism, checked in one place.

Everything else (command line, YAML, recipes) only fills this dataclass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from longctx_patch.memory.policies import POLICIES, CheckpointPolicy, names_that_keep_attention
from longctx_patch.names import require_choice

LayoutName = Literal["zigzag", "contiguous", "striped", "balanced"]
PlanName = Literal[
    "auto",
    "ring",
    "zigzag",
    "zigzag_direct",
    "striped",
    "distflash",
    "distflash_balanced",
    "burst",
    "double_ring",
    "allgather",
    "halo",
]
SPARSE_PLAN: PlanName = "halo"
"""What `auto` takes for masks that leave blocks out, and layers with a window always run."""
HardwareName = Literal["h200", "h100", "a100", "a100-40"]
LossName = Literal["chunked", "logits"]

# Each plan is balanced, or at all defined, for some placements of tokens; the first is its own.
LAYOUTS_OF_PLAN: Mapping[str, tuple[LayoutName, ...]] = MappingProxyType(
    {
        "ring": ("contiguous", "balanced"),
        "zigzag": ("zigzag",),
        "zigzag_direct": ("zigzag",),
        "striped": ("striped",),
        "distflash": ("contiguous",),
        "distflash_balanced": ("contiguous",),
        "burst": ("zigzag", "striped", "balanced"),
        "double_ring": ("zigzag", "contiguous", "striped", "balanced"),
        "allgather": ("zigzag", "contiguous", "balanced"),
        "halo": ("zigzag", "contiguous", "striped", "balanced"),
    }
)


@dataclass(frozen=True, kw_only=True)
class LongContextConfig:
    """How a sequence is cut over a group of ranks and how attention crosses the cuts."""

    ulysses_degree: int = 1
    """Ranks that exchange heads for tokens (DeepSpeed-Ulysses): consecutive ones, in a node."""

    ring_degree: int = 1
    """Ranks (or groups of Ulysses ranks) that pass key-value blocks to each other."""

    ulysses_waves: int | None = None
    """Ulysses exchanges heads in this many parts (fewer, if a rank has fewer heads), so that those
    of one part travel while another is computed. None: as many as the cost model says."""

    layout: LayoutName | None = None
    """Placement of tokens over the ring ranks. None: the plan's, else `zigzag`, which balances a
    causal mask, and `balanced` for packed rows. See `placement` and `packed_placement`."""

    plan: PlanName = "auto"
    """Schedule of the ring part (`longctx_patch.plans`). `auto`: the cost model takes one of those
    made for the layout (`longctx_patch.explain` says which and why), and `halo` for masks that
    leave blocks out, such as packed documents. Layers with a sliding window always run `halo`,
    which sends what is inside the window only."""

    backward_plan: PlanName = "auto"
    """Schedule of backward, made for the same layout; `auto` takes the forward one, or where that
    is `auto` too, the cost model's."""

    ranks_per_node: int | None = None
    """Ring ranks on one machine, for `double_ring` and `auto`; they are numbered machine by
    machine. None: for `auto`, as many as the hardware's nodes have."""

    hardware: HardwareName = "h100"
    """The machine that `auto` chooses for. It changes which plan runs, never what it computes."""

    kernel: str = "auto"
    """Attention kernel of one block; `longctx_patch.kernels.available()` lists the names."""

    deterministic: bool = False
    """Two runs on the same GPUs are bitwise equal, in what attention and its plans compute: kernels
    whose backward can't sum in a fixed order are refused, and none is chosen by a measurement."""

    checkpoint: CheckpointPolicy = "none"
    """`none`: keep all activations; `full`: recompute each layer, attention included;
    `attention`: recompute each layer but keep attention's output and lse, so that the recompute
    runs neither its kernel nor its communication (DISTFLASHATTN, section 3.3); `offload`: the same,
    with what each layer keeps in pinned host memory until backward; `auto`: by layer, `none` in as
    many of the last ones as the GPU's memory takes, `attention` in the others, and `offload` in the
    first if need be, measured in the first steps (`longctx_patch.memory.auto`; on CPU `attention`
    in all)."""

    attention_kept: float = 1.0
    """Under `attention`, `offload` and `auto`: the share of a row's tokens, from 0 to 1, whose
    output and lse a layer keeps. They are the last of each document, which cost most to compute
    again; the others are, in backward, which takes (1 - share)^2 of attention's forward pass and
    its communication (BurstEngine, sequence-level selective checkpointing; see
    `longctx_patch.engine.selective`). Ring ranks keep equally much where `layout` spreads documents
    over them, so that it is `striped` then, where plans are made for it and unless given."""

    mlp_tiles: int | None = None
    """Each decoder layer's MLP runs over this many tiles of a rank's tokens, one after the other,
    in forward and again in backward, so that its intermediates exist for one tile only
    (`longctx_patch.memory.tiled_mlp`). 1: over all at once, and what backward needs is kept as
    `checkpoint` says. None: on CUDA as few as keep those of a tile within 1/16 of the GPU's memory,
    and 1 elsewhere. Layers with experts stay whole; a number above 1 is refused where all have
    them."""

    loss: LossName = "chunked"
    """How a sharded pass with labels gets its loss. `chunked`: a part of the tokens at a time, so
    that no rank ever holds all its logits; `out.logits` is None then, and the loss goes backward
    once. `logits`: from full logits, which `out.logits` returns. A pass without labels returns
    logits under both."""

    def __post_init__(self) -> None:
        counts = {"ulysses_waves": "it counts parts", "mlp_tiles": "it counts tiles"}
        for name in ("ulysses_degree", "ring_degree", *counts):
            value = getattr(self, name)
            if name in counts and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                kind = "" if type(value) is int else f", of type {type(value).__name__}"
                what = counts.get(name, "a degree counts ranks")
                raise ValueError(
                    f"{name}={value!r}{kind}: {what}, a whole number of 1 or more. Use {name}=1 to "
                    "switch it off."
                )
        if self.layout is not None:
            require_choice("layout", self.layout, get_args(LayoutName))
        require_choice("plan", self.plan, get_args(PlanName))
        require_choice("backward_plan", self.backward_plan, get_args(PlanName))
        require_choice("hardware", self.hardware, get_args(HardwareName))
        require_choice("loss", self.loss, get_args(LossName))
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic={self.deterministic!r}: give True or False.")
        require_choice("checkpoint", self.checkpoint, tuple(POLICIES))
        self._check_share()
        for field in ("plan", "backward_plan"):
            plan = getattr(self, field)
            layouts = LAYOUTS_OF_PLAN.get(plan, (self.placement,))
            if self.placement not in layouts:
                made_for = " or ".join(repr(layout) for layout in layouts)
                raise ValueError(
                    f"{field}={plan!r} with layout={self.placement!r}: this plan is made for "
                    f"layout={made_for}. Forward and backward share one layout; give one of these, "
                    f"or use {field}='auto'."
                )
        self._check_nodes()

    def _check_share(self) -> None:
        share = self.attention_kept
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not 0 <= share <= 1:
            raise ValueError(
                f"attention_kept={share!r}: it is a share of the tokens. Use a number from 0 to 1."
            )
        if share < 1 and not POLICIES[self.checkpoint].keeps_attention:
            raise ValueError(
                f"attention_kept={share} with checkpoint={self.checkpoint!r}, which keeps all of "
                "attention or nothing. Use one of the policies that keep it: "
                f"checkpoint={' or '.join(map(repr, names_that_keep_attention()))}."
            )

    def _check_nodes(self) -> None:
        size, plans = self.ranks_per_node, (self.plan, self.backward_plan)
        if size is None and "double_ring" not in plans:
            return
        taken = "double_ring" in plans or self.plan == "auto"
        if not taken or type(size) is not int or size < 1 or self.ring_degree % size:
            raise ValueError(
                f"ranks_per_node={size} with plan={self.plan!r}, backward_plan="
                f"{self.backward_plan!r} and ring_degree={self.ring_degree}: 'double_ring' needs "
                "it, 'auto' may have it, no other plan takes it, and it must divide ring_degree. "
                "Give the ring ranks that share a machine."
            )

    @property
    def placement(self) -> LayoutName:
        """The layout of a row with one document, decided."""
        fitting = LAYOUTS_OF_PLAN.get(self.plan, ("zigzag", "striped"))
        backward = LAYOUTS_OF_PLAN.get(self.backward_plan, fitting)
        spreads = self.attention_kept < 1 and "striped" in fitting and "striped" in backward
        return self.layout or ("striped" if spreads else fitting[0])

    @property
    def packed_placement(self) -> LayoutName:
        """The layout of a row with several documents, decided."""
        if self.attention_kept < 1 and self.placement == "striped":
            return "striped"  # the ends of long documents, which are kept, would be on few ranks
        plans = (self.plan, self.backward_plan)
        fits = all("balanced" in LAYOUTS_OF_PLAN.get(plan, ("balanced",)) for plan in plans)
        return "balanced" if self.layout is None and fits else self.placement

    @property
    def sequence_degree(self) -> int:
        """Number of ranks that share one sequence."""
        return self.ulysses_degree * self.ring_degree
