"""Decide the plans of an attention call whose degrees are known."""

from collections.abc import Iterable
from functools import lru_cache

from longctx_patch.choose.tie import Cost, preferred
from longctx_patch.config import LongContextConfig
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS, SPARSE_PLAN, plan_for
from longctx_patch.predict.attention.costs import Workload, predict
from longctx_patch.predict.machines import MACHINES, Hardware
from longctx_patch.sequence.layout import LayoutName


@lru_cache(maxsize=1024)
def decide(
    config: LongContextConfig,
    workload: Workload,
    hardware: Hardware | None = None,
    *,
    placement: LayoutName | None = None,
    is_causal: bool | None = None,
) -> Setting:
    """The setting that a config runs: what it names stays, and the cost model decides the rest.

    A mask that is not plain causal leaves blocks out, and `auto` takes the plan that sends only
    what is needed.

    Args:
        config: degrees, layout and plans, each given or not.
        workload: the sizes of the call.
        hardware: the machine, if not the preset that the config names.
        placement: where tokens are; None: where the config places the workload's documents.
        is_causal: whether the mask is plain causal; None: as the workload's documents and window.
    """
    hardware = hardware or MACHINES[config.hardware]
    sparse = not (workload.is_causal if is_causal is None else is_causal)
    forward, backward = (_plan(config, d, workload, hardware, sparse) for d in Direction)
    return Setting(
        plan=forward,
        backward_plan=backward,
        layout=placement or config.placement_of(workload.documents()),
        ulysses_degree=config.ulysses_degree,
        ring_degree=config.ring_degree,
        ranks_per_node=_ring_ranks_in_node(config, hardware),
    )


def _plan(
    config: LongContextConfig,
    direction: Direction,
    workload: Workload,
    hardware: Hardware,
    sparse: bool,
) -> str:
    """The name of one direction's plan."""
    plan: str = config.plan if direction is Direction.FORWARD else config.backward_plan
    if plan == "auto" and direction is Direction.BACKWARD and config.plan != "auto":
        plan = config.plan
    if plan != "auto":
        return plan_for(plan, direction, config.placement)
    if sparse:
        return SPARSE_PLAN
    candidates = [
        setting
        for setting in settings_of(config, hardware)
        if serves(setting.plan, direction) and _fits(setting, workload)
    ]
    if len(candidates) == 1:
        return candidates[0].plan
    costs = {
        setting: Cost.of([(predict(setting, direction, workload, hardware), 1)])
        for setting in candidates
    }
    return preferred(costs).plan


def serves(plan: str, direction: Direction) -> bool:
    """Whether a plan has a direction."""
    return direction in PLANS[plan].directions


def _fits(setting: Setting, workload: Workload) -> bool:
    """Whether latents can travel where the degrees allow it."""
    return workload.latent_dim is None or setting.ulysses_degree > 1 or setting.may_send_latents


def settings_of(config: LongContextConfig, hardware: Hardware) -> list[Setting]:
    """What `auto` may choose from: the plans of the config's layout, or one if there is no ring."""
    per_node = _ring_ranks_in_node(config, hardware)
    asked = (config.plan, config.backward_plan)
    plans: Iterable[str] = [
        plan
        for plan, record in PLANS.items()
        if config.placement in record.layouts
        and (not record.is_sparse or plan in asked)
        and (not record.needs_full_nodes or has_full_nodes(config.ring_degree, per_node))
    ]
    return [
        Setting(
            plan=plan,
            layout=config.placement,
            ulysses_degree=config.ulysses_degree,
            ring_degree=config.ring_degree,
            ranks_per_node=per_node,
        )
        for plan in (list(plans)[:1] if config.ring_degree == 1 else plans)
    ]


def _ring_ranks_in_node(config: LongContextConfig, hardware: Hardware) -> int:
    return config.ranks_per_node or ring_ranks_in_node(config.ulysses_degree, hardware)


def ring_ranks_in_node(ulysses_degree: int, hardware: Hardware) -> int:
    """Ring ranks on one machine, whose Ulysses ranks are consecutive."""
    return max(1, hardware.gpus_per_node // ulysses_degree)


def has_full_nodes(ring_degree: int, per_node: int) -> bool:
    """Whether ring ranks fill several nodes, so that a double ring has both its rings."""
    return 1 < per_node < ring_degree and ring_degree % per_node == 0
