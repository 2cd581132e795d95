"""What `longctx patch` says of memory and time, where --gpus names a kind."""

import dataclasses
from typing import Any

from longctx_patch.cli.patch_options import PatchOptions
from longctx_patch.families.facts import ModelFacts
from longctx_patch.planner.advice import advice
from longctx_patch.planner.job import Cluster, parse_cluster
from longctx_patch.planner.search import Result
from longctx_patch.recipes.memory_report import predict_run
from longctx_patch.recipes.settings import Settings

PAIRS = "what pairs and their reference take"


def cluster_of(
    gpus: str, num_gpus: int, nodes: int, *, host_gib: float | None, cpu: bool
) -> Cluster | None:
    """The GPUs that --gpus names, spread evenly over `nodes` machines; None if it names no kind.

    Raises ValueError for more GPUs than a machine has, and for a `host_gib` where nothing is
    predicted that could be compared with it.
    """
    if gpus.isdigit() or cpu:
        if host_gib is not None:
            raise ValueError(
                f"--host-gib {host_gib:g}: predictions are checked against it. Name the kind of "
                f"GPUs, such as --gpus {num_gpus}xH200, and leave out --cpu."
            )
        return None
    cluster = parse_cluster(gpus, host_gib)
    most, per_node = cluster.hardware.gpus_per_node, -(-num_gpus // nodes)
    if per_node > most:
        raise ValueError(
            f"--gpus {gpus} in --nodes {nodes}: machines of {cluster.hardware.name.upper()} "
            f"have up to {most}. Use --nodes {-(-num_gpus // most)}."
        )
    hardware = dataclasses.replace(cluster.hardware, gpus_per_node=per_node)
    return dataclasses.replace(cluster, hardware=hardware)


def why_unpredicted(config: Any, *, is_dpo: bool) -> str:
    """What of a run is not predicted, such as the experts of its model; empty if all is."""
    facts = ModelFacts.of(config)
    found = facts.unpredicted
    if found and found == facts.unmeasured:  # "layer 0 is mamba" is no option
        found = f"the recurrence ({found})"
    return f"what {found} takes" if found else PAIRS if is_dpo else ""


def run_of(options: PatchOptions, settings: Settings, config: Any, cluster: Cluster) -> Result:
    """What a run with these settings takes on these GPUs."""
    on_host, rows = options.states_on_host, options.step_rows
    return predict_run(settings, config, cluster, states_on_host=on_host, rows_per_step=rows)


def prediction(
    options: PatchOptions, settings: Settings, config: Any, cluster: Cluster
) -> Result | None:
    """What the run is predicted to take; None where it is not (`why_unpredicted`).

    Raises ValueError where the run is predicted not to fit, with what to change.
    """
    if why := why_unpredicted(config, is_dpo=options.dpo):
        if cluster.host_bytes is not None:
            raise ValueError(
                f"--host-gib {cluster.host_bytes / 2**30:g}: {why} is not predicted, so that "
                "nothing could be compared with it. Leave it out."
            )
        return None
    return require_fit(run_of(options, settings, config, cluster))


def require_fit(result: Result) -> Result:
    """Raise ValueError where a run is predicted not to fit, with what to change."""
    if not result.fits:
        raise ValueError(
            f"--gpus {result.job.cluster}: the run {result.reason}. {advice(result)}. `longctx "
            "plan` compares more; with the number of GPUs alone nothing is predicted."
        )
    return result
