"""Checks, in one place, what a user decides about sequence parallelism.

Everything else (command line, YAML, recipes) only fills this dataclass.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from longctx_patch.memory.policies import POLICIES, CheckpointPolicy, names_that_keep_attention
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import (
    PLANS,
    SPARSE_PLAN,
    PlanRecord,
    auto_plan,
    plan_for,
)
from longctx_patch.plans.recurrent import RecurrentExchange
from longctx_patch.plans.types import Direction
from longctx_patch.rules.gone import refuse_gone
from longctx_patch.rules.names import require_choice
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout, LayoutName, length_multiple
from longctx_patch.sequence.placement import place

GPUS_PER_NODE = 8
"""GPUs of a machine, where nothing else is said."""

HardwareName = Literal[
    "h200", "h100", "a100", "a100-40", "l40s", "a6000", "rtx6000-ada", "rtx5090", "rtx4090"
]
LossName = Literal["chunked", "logits"]
KvExchange = Literal["auto", "heads", "latent"]
PrefixSharing = Literal["off", "auto", "always"]


@dataclass(frozen=True, kw_only=True)
class LongContextConfig:
    """Says how a sequence is cut over a group of ranks, and how attention crosses the cuts."""

    ulysses_degree: int = 1
    """Number of ranks that exchange heads for tokens (DeepSpeed-Ulysses). They are consecutive, and
    should share a node."""

    ring_degree: int = 1
    """Number of ranks (or groups of Ulysses ranks) that pass key-value blocks to each other."""

    layout: LayoutName | None = None
    """How tokens are placed over the ring ranks. None: the plan's own layout; under `auto` it is
    `zigzag`, which balances a causal mask, and `balanced` for packed rows. See `placement_of`."""

    plan: str = "auto"
    """Schedule of the ring part (`longctx_patch.plans`). `auto`: a rule takes one of the plans made
    for the layout (`longctx_patch.compare` has them side by side), or `halo` where the mask
    leaves blocks out, as that of packed documents does. Layers with a sliding window always run
    `halo`, which sends only what is inside the window."""

    backward_plan: str = "auto"
    """Schedule of backward, which must be made for the same layout. `auto` takes the plan of
    forward; where that is `auto` too, the rule decides."""

    kv_exchange: KvExchange = "auto"
    """What ring ranks pass to each other for keys and values in latent attention (MLA). `latent`:
    each token's latent, which every rank expands block by block where it computes; gradients of
    latents go back. `heads`: the keys and values of all heads, padded to one size. `auto`: latents
    where there is a ring without Ulysses, which exchanges heads, and they have fewer numbers. Other
    models have heads only."""

    ranks_per_node: int | None = None
    """Number of ring ranks on one machine, which `double_ring` needs and `auto` can use. Ranks are
    numbered machine by machine. None: `auto` takes as many as the hardware's nodes have."""

    hardware: HardwareName = "h100"
    """The machine that predictions are of, and that degrees are chosen for."""

    kernel: str = "auto"
    """Kernel that computes attention of one block; `longctx_patch.kernels.available()` lists the
    names."""

    deterministic: bool = False
    """Whether attention and its plans give bitwise equal results in two runs on the same GPUs.
    Kernels whose backward can't sum in a fixed order are refused, and no kernel is chosen by
    measurement."""

    checkpoint: CheckpointPolicy = "none"
    """`none`: keep all activations; `full`: recompute each layer, attention included;
    `attention`: recompute each layer but keep attention's output and lse, so that the recompute
    runs neither its kernel nor its communication (DISTFLASHATTN, section 3.3), and what recurrent
    layers got of other ranks; `offload`: as `attention`, but what a layer keeps is in pinned host
    memory until backward; `auto`: measures memory in the first steps, then takes `none` for as many
    of the last layers as the GPU has room for, `attention` for the others, and `offload` for the
    first ones if need be (`longctx_patch.memory.auto`; on CPU `attention` for all)."""

    attention_kept: float = 1.0
    """Share of a row's tokens, from 0 to 1, whose output and lse a layer keeps under `attention`,
    `offload` and `auto`. These are the last tokens of each document, which cost most to compute
    again. Backward recomputes attention of the others, which takes (1 - share)^2 of its forward
    pass and its communication (BurstEngine, sequence-level selective checkpointing; see
    `longctx_patch.engine.selective`). Below 1, `layout` defaults to `striped` if the plans allow
    it: this layout spreads documents, so that all ring ranks keep equally much."""

    mlp_tiles: int | None = None
    """Each decoder layer's MLP runs over this many tiles of a rank's tokens, one after the other,
    in forward and again in backward, so that its intermediates exist for one tile only
    (`longctx_patch.memory.tiled_mlp`). 1: the MLP runs over all tokens at once, and `checkpoint`
    says what is kept for backward. None: on CUDA, the fewest tiles whose intermediates fit into
    1/16 of the GPU's memory; elsewhere 1. Layers with experts stay whole; a number above 1 is
    refused where all layers have experts."""

    torch_recurrence: bool = False
    """Whether recurrent layers on a GPU may run transformers' torch functions where the packages
    with their kernels (flash-linear-attention, mamba-ssm, causal-conv1d) are not installed. They
    are exact and many times slower, and keep all their intermediates for backward."""

    recurrent_exchange: RecurrentExchange = "auto"
    """What ranks send for a recurrent layer's state. `states`: the state goes along all ranks that
    share a row, as small maps. `heads`: ranks of a Ulysses group exchange heads for tokens, as in
    attention, and the state goes along the ring alone; refused where the heads don't divide.
    `auto`: `heads` for delta rules on long rows of few documents without a ring, where the heads
    divide; else `states`. The convolution before it takes its few tokens from the ranks before in
    any case."""

    allow_beyond_reach: bool = False
    """Whether documents may be longer than the model's RoPE reaches (`max_position_embeddings`, or
    what its scaling makes of it). Otherwise they are refused in training and shared evaluation."""

    shifted_group: int = 0
    """Tokens of a group of shifted sparse attention (LongLoRA, arXiv 2309.12307, which takes a
    quarter of the row); 0: none. In training mode alone, layers with full attention cut each
    document into groups. Half of the heads see their group, causally; the other half see groups
    that lie half a group further, so that the first half group of a document is one of its own.
    Halves are of key-value heads with their query heads, the first ones unshifted (one more than
    the others where their number is odd); a single key-value head serves both halves of the query
    heads. Layers with a window keep it."""

    share_prefixes: PrefixSharing = "auto"
    """Whether whole rows of a batch that begin alike become one row with branches, in which each
    beginning is computed once (DPO pairs, GRPO groups, turns of a conversation). What the model
    returns is of the rows that were given, and so are gradients, router losses included. `always`:
    wherever a batch has any; refused where it can't be done exactly, as with images, chunked
    attention, dropout or a mask of one's own. `auto`: where it saves a tenth of the
    layers' FLOPs or more, by the rows' ids and the model's config alone; rows that can't share are
    computed apart, with a warning. `off`: every row is computed by itself."""

    loss: LossName = "chunked"
    """How a sharded pass with labels computes its loss. `chunked`: from a part of the tokens at a
    time, so that no rank ever holds all its logits; `out.logits` is None then, and the loss can go
    backward only once. `logits`: from full logits, which `out.logits` returns. A pass without
    labels returns logits under both."""

    def __new__(cls, **settings: Any) -> Self:
        """Refuses settings that went, before `__init__` refuses names that never existed."""
        refuse_gone(settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_counts()
        for name, choices in (
            ("layout", get_args(LayoutName)),
            ("plan", ("auto", *PLANS)),
            ("backward_plan", ("auto", *PLANS)),
            ("hardware", get_args(HardwareName)),
            ("loss", get_args(LossName)),
            ("kv_exchange", get_args(KvExchange)),
            ("share_prefixes", get_args(PrefixSharing)),
            ("recurrent_exchange", get_args(RecurrentExchange)),
            ("checkpoint", tuple(POLICIES)),
        ):
            if (value := getattr(self, name)) is not None or name != "layout":
                require_choice(name, value, choices)
        for name in ("deterministic", "torch_recurrence", "allow_beyond_reach"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r}: give True or False.")
        group = self.shifted_group
        if not isinstance(group, int) or isinstance(group, bool) or group < 0 or group % 2:
            raise ValueError(
                f"shifted_group={group!r}: half of the heads see groups that lie half a group "
                "further. Give an even number of tokens, a quarter of the row say; or 0 for none."
            )
        self._check_share()
        self._check_layouts()
        self._check_nodes()
        if self.kv_exchange == "latent" and (why := self.heads_travel_because()) is not None:
            raise ValueError(f"kv_exchange='latent': {why}. Use kv_exchange='auto'.")
        if self.recurrent_exchange == "heads" and self.ulysses_degree == 1:
            raise ValueError(
                "recurrent_exchange='heads' with ulysses_degree=1: no ranks exchange heads. Use "
                "recurrent_exchange='auto', or a ulysses_degree above 1."
            )

    def _check_counts(self) -> None:
        for name in ("ulysses_degree", "ring_degree", "mlp_tiles"):
            value = getattr(self, name)
            if name == "mlp_tiles" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                kind = "" if type(value) is int else f", of type {type(value).__name__}"
                what = "it counts tiles" if name == "mlp_tiles" else "a degree counts ranks"
                use = f"Use {name}=1 to switch it off."
                if isinstance(value, str) and value.isdecimal() and int(value):
                    use = f"Use {name}={int(value)}."
                raise ValueError(
                    f"{name}={value!r}{kind}: {what}, a whole number of 1 or more. {use}"
                )

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

    def _check_layouts(self) -> None:
        for field in ("plan", "backward_plan"):
            plan = getattr(self, field)
            if plan in PLANS and self.placement not in PLANS[plan].layouts:
                made_for = " or ".join(repr(layout) for layout in PLANS[plan].layouts)
                raise ValueError(
                    f"{field}={plan!r} with layout={self.placement!r}: this plan is made for "
                    f"layout={made_for}. Forward and backward share one layout; give one of these, "
                    f"or use {field}='auto'."
                )

    def _check_nodes(self) -> None:
        size, needed = self.ranks_per_node, any(plan.needs_full_nodes for plan in self._named_plans)
        if size is None and not needed:
            return
        taken = needed or self.plan == "auto"
        if not taken or type(size) is not int or size < 1 or self.ring_degree % size:
            takers = " and ".join(
                repr(name) for name, plan in PLANS.items() if plan.needs_full_nodes
            )
            raise ValueError(
                f"ranks_per_node={size} with plan={self.plan!r}, backward_plan="
                f"{self.backward_plan!r} and ring_degree={self.ring_degree}: only "
                f"{takers}, which needs ranks_per_node, and 'auto' accept it, and it must divide "
                "ring_degree. Give the ring ranks that share a machine."
            )

    @property
    def _named_plans(self) -> list[PlanRecord]:
        """The plans of forward and backward that are named, and not left to `auto`."""
        return [PLANS[name] for name in (self.plan, self.backward_plan) if name in PLANS]

    def heads_travel_because(self) -> str | None:
        """Says why latents can't travel under these degrees and plans, in words; None: they can."""
        if self.ulysses_degree > 1:
            return (
                f"ulysses_degree={self.ulysses_degree} exchanges heads, so latents are expanded "
                "before. They travel in a ring alone (ulysses_degree=1)"
            )
        if self.ring_degree == 1:
            return "ring_degree=1: one rank passes nothing on"
        if any(plan.gathers for plan in self._named_plans):
            return (
                f"plan={self.plan!r}, backward_plan={self.backward_plan!r}: where the keys of all "
                "ranks are computed with at once, heads of the whole row would be expanded. Take a "
                "ring's plan"
            )
        return None

    @property
    def placement(self) -> LayoutName:
        """The layout of rows with one document: `layout`, or its default."""
        fitting = PLANS[self.plan].layouts if self.plan in PLANS else ("zigzag", "striped")
        all_fit = [fitting, *(plan.layouts for plan in self._named_plans)]
        spreads = self.attention_kept < 1 and all("striped" in layouts for layouts in all_fit)
        return self.layout or ("striped" if spreads else fitting[0])

    @property
    def packed_placement(self) -> LayoutName:
        """The layout of rows with several documents: `layout`, or its default."""
        if self.attention_kept < 1 and self.placement == "striped":
            return "striped"  # `balanced` would put the kept ends of long documents on few ranks
        fits = all("balanced" in plan.layouts for plan in self._named_plans)
        return "balanced" if self.layout is None and fits else self.placement

    def placement_of(self, documents: Documents) -> LayoutName:
        """The layout of a row of these documents, by its name."""
        return self.placement if documents.is_one else self.packed_placement

    def setting_of(
        self,
        placement: LayoutName,
        *,
        num_tokens: int,
        reuse: float,
        is_causal: bool,
        gpus_per_node: int = GPUS_PER_NODE,
    ) -> Setting:
        """Returns how a call runs: plans that are named stay, and `auto` takes those of a rule
        (`plans.generators.table.auto_plan`), or the sparse plan where a mask leaves blocks out.

        Args:
            placement: where the tokens of the row are.
            num_tokens: those of the row.
            reuse: query heads that are computed with each key-value head that is sent.
            is_causal: whether the mask is plainly causal.
            gpus_per_node: the machine's; `ranks_per_node` goes before it.
        """
        per_node = self.ranks_per_node or max(1, gpus_per_node // self.ulysses_degree)

        def plan(direction: Direction) -> str:
            named = self.plan if direction is Direction.FORWARD else self.backward_plan
            if named == "auto" and self.plan != "auto":
                named = self.plan
            if named != "auto":
                return plan_for(named, direction, self.placement)
            if not is_causal:
                return SPARSE_PLAN
            return auto_plan(
                direction,
                self.placement,
                num_ranks=self.ring_degree,
                ranks_per_node=per_node,
                rank_tokens=num_tokens / self.sequence_degree,
                reuse=reuse,
            )

        return Setting(
            plan=plan(Direction.FORWARD),
            backward_plan=plan(Direction.BACKWARD),
            layout=placement,
            ulysses_degree=self.ulysses_degree,
            ring_degree=self.ring_degree,
            ranks_per_node=per_node,
        )

    def layout_of(self, documents: Documents) -> Layout:
        """Returns which tokens of a row each rank of the group holds."""
        name = self.placement_of(documents)
        return place(name, documents, ring=self.ring_degree, ulysses=self.ulysses_degree)

    def ring_layout_of(self, documents: Documents) -> Layout:
        """The same, with each Ulysses group as one rank, which holds the tokens of its ranks one
        after the other."""
        return place(self.placement_of(documents), documents, ring=self.ring_degree)

    def padding_multiple(self, *, packed: bool) -> int:
        """Lengths that are a multiple of this give every rank the same number of tokens."""
        name = self.packed_placement if packed else self.placement
        return length_multiple(name, ring=self.ring_degree, ulysses=self.ulysses_degree)

    @property
    def degrees_in_words(self) -> str:
        """The two degrees, as errors name them."""
        return f"ulysses_degree={self.ulysses_degree} x ring_degree={self.ring_degree}"

    @property
    def sequence_degree(self) -> int:
        """Number of ranks that share one sequence."""
        return self.ulysses_degree * self.ring_degree


def require_config(given: object, name: str = "config") -> None:
    """Raise TypeError for what is no config, a dict of settings, say."""
    if isinstance(given, LongContextConfig):
        return
    how = "LongContextConfig(**settings)" if isinstance(given, dict) else "one"
    raise TypeError(f"{name} is a {type(given).__name__}, not a LongContextConfig: give {how}.")
