"""The plans of an attention call whose degrees are known: what runs, and what else could."""

from longctx_patch.config import LongContextConfig
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS, has_full_nodes
from longctx_patch.predict.attention.costs import Workload
from longctx_patch.predict.machines import MACHINES, Hardware


def decide(
    config: LongContextConfig, workload: Workload, hardware: Hardware | None = None
) -> Setting:
    """The setting that a config runs for a workload, by default on the machine that it names."""
    hardware = hardware or MACHINES[config.hardware]
    reuse = workload.num_heads / workload.num_kv_heads
    if workload.latent_dim and config.heads_travel_because() is None:
        reuse = 2 * workload.head_dim * workload.num_heads / workload.latent_dim
    return config.setting_of(
        config.placement_of(workload.documents()),
        num_tokens=workload.num_tokens,
        reuse=reuse,
        is_causal=workload.is_causal,
        gpus_per_node=hardware.gpus_per_node,
    )


def serves(plan: str, direction: Direction) -> bool:
    """Whether a plan has a direction."""
    return direction in PLANS[plan].directions


def settings_of(config: LongContextConfig, hardware: Hardware) -> list[Setting]:
    """The plans of the config's layout, or one if there is no ring."""
    per_node = config.ranks_per_node or ring_ranks_in_node(config.ulysses_degree, hardware)
    asked = (config.plan, config.backward_plan)
    plans = [
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
        for plan in (plans[:1] if config.ring_degree == 1 else plans)
    ]


def ring_ranks_in_node(ulysses_degree: int, hardware: Hardware) -> int:
    """Ring ranks on one machine, whose Ulysses ranks are consecutive."""
    return max(1, hardware.gpus_per_node // ulysses_degree)
