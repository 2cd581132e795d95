"""What a user decides about sequence parallelism, checked in one place.

Imports nothing of ours. Everything else (command line, YAML, recipes) only fills this dataclass.
"""

from dataclasses import dataclass
from typing import Literal, get_args

LayoutName = Literal["zigzag", "contiguous"]
PlanName = Literal["auto", "ring", "zigzag"]
CheckpointPolicy = Literal["none", "full", "attention"]

# Each plan is balanced, or at all defined, for one placement of tokens.
LAYOUT_OF_PLAN: dict[str, LayoutName] = {"ring": "contiguous", "zigzag": "zigzag"}


@dataclass(frozen=True, kw_only=True)
class LongContextConfig:
    """How a sequence is cut over a group of ranks and how attention crosses the cuts."""

    ulysses_degree: int = 1
    """Ranks that exchange heads for tokens (DeepSpeed-Ulysses): consecutive ones, in a node."""

    ring_degree: int = 1
    """Ranks (or groups of Ulysses ranks) that pass key-value blocks to each other."""

    layout: LayoutName = "zigzag"
    """Placement of tokens over the ring ranks. `zigzag` balances a causal mask."""

    plan: PlanName = "auto"
    """Schedule of the ring part. `auto` takes the one made for the layout."""

    kernel: str = "auto"
    """Attention kernel of one block; `longctx_patch.kernels.available()` lists the names."""

    checkpoint: CheckpointPolicy = "none"
    """`none`: keep all activations; `full`: recompute each layer, attention included;
    `attention`: recompute each layer but keep attention's output and lse, so that neither its
    kernel nor its communication runs twice (DISTFLASHATTN, section 3.3)."""

    def __post_init__(self) -> None:
        for name in ("ulysses_degree", "ring_degree"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{name}={value!r}: a degree is a whole number of ranks, 1 or more. "
                    f"Use {name}=1 to switch it off."
                )
        _require_choice("layout", self.layout, get_args(LayoutName))
        _require_choice("plan", self.plan, get_args(PlanName))
        _require_choice("checkpoint", self.checkpoint, get_args(CheckpointPolicy))
        wanted = LAYOUT_OF_PLAN.get(self.plan, self.layout)
        if wanted != self.layout:
            raise ValueError(
                f"plan={self.plan!r} with layout={self.layout!r}: this plan is made for "
                f"layout={wanted!r}. Use layout={wanted!r}, or plan='auto'."
            )

    @property
    def sequence_degree(self) -> int:
        """Number of ranks that share one sequence."""
        return self.ulysses_degree * self.ring_degree


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}.")
