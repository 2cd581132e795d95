"""Says how an attention call runs: what the chooser decides for the engine and for predictions."""

from dataclasses import dataclass, replace

from longctx_patch.plans.generators.table import PLANS, make_schedule
from longctx_patch.plans.schedule import Schedule
from longctx_patch.plans.types import Direction
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import LayoutName
from longctx_patch.sequence.masks import Mask
from longctx_patch.sequence.placement import place


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Degrees, placement and the plans of both directions; nothing is `auto` any more."""

    plan: str
    layout: LayoutName
    ulysses_degree: int
    ring_degree: int
    backward_plan: str | None = None
    """None: the plan of forward."""
    ranks_per_node: int | None = None
    """Ring ranks on one machine; None: as many as the hardware has GPUs for."""

    def plan_of(self, direction: Direction) -> str:
        """The name of one direction's plan."""
        if direction is Direction.FORWARD or self.backward_plan is None:
            return self.plan
        return self.backward_plan

    def name(self, direction: Direction) -> str:
        """The plan of a direction as reports name it: `ulysses` where there is no ring."""
        is_ulysses = self.ring_degree == 1 < self.ulysses_degree
        return "ulysses" if is_ulysses else self.plan_of(direction)

    @property
    def may_send_latents(self) -> bool:
        """Says whether latents, if a model has them, are expanded block by block where they arrive:
        Ulysses exchanges heads, and gathered latents would be those of a whole row."""
        plans = {self.plan_of(direction) for direction in Direction}
        return self.ulysses_degree == 1 and not any(PLANS[plan].gathers for plan in plans)

    def with_plan(self, plan: str) -> "Setting":
        """The same setting with another plan in both directions."""
        return replace(self, plan=plan, backward_plan=None)

    def schedule(
        self, direction: Direction, documents: Documents, mask: Mask, num_kv_heads: int
    ) -> Schedule:
        """The ring part's schedule; `num_kv_heads` are those that one of its ranks computes."""
        return make_schedule(
            self.plan_of(direction),
            direction,
            place(self.layout, documents, ring=self.ring_degree),
            mask,
            num_kv_heads=num_kv_heads,
            ranks_per_node=self.ranks_per_node,
        )
