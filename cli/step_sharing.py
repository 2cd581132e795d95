"""How the GPUs of a run folder share the rows of a step: as asked, or as is predicted fastest; and
what of memory and time is predicted, where --gpus names a kind."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from longctx_patch.cli.degree_options import DegreeChooser, asked_degrees
from longctx_patch.cli.patch_options import PatchOptions
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.planner.advice import advice, fastest
from longctx_patch.planner.degrees import TIE, Way
from longctx_patch.planner.job import Cluster, nearest_multiples, parse_cluster
from longctx_patch.planner.machines import MACHINES
from longctx_patch.planner.search import Result, possible_degrees
from longctx_patch.recipes.memory_report import job_of, predict_run
from longctx_patch.recipes.settings import Settings

PAIRS = "what pairs and their reference take"


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Degrees and forwards of a step, and why."""

    settings: Settings
    """The run's, with degrees, layout and forwards."""
    why: str
    """Why these degrees."""
    predicted: Result | None
    """None where these GPUs or the model are not known."""
    faster: str = ""
    """What to add so that another number of GPUs shares each row, where that trains more tokens a
    second; it trains another number of rows in a step."""


def share(
    options: PatchOptions, settings: Settings, config: Any, cluster: Cluster | None
) -> Sharing:
    """Decide how many GPUs share each row, in which way, and how many rows each trains in a step.

    Raises ValueError for degrees that don't fit, and for a run that is predicted not to fit.
    """
    chooser = _chooser(options, settings, config, cluster)
    if options.step_rows is not None and not options.names_degrees:
        return _fastest(options, settings, config, cluster, chooser)
    degree, asked = degrees_of(options)
    forwards = forwards_of_step(options.step_rows, options.num_gpus, degree)
    way, why = (asked, "as asked") if asked else chooser.choose(degree)
    decided = _decided(settings, way, forwards)
    check_model_config(config, decided.sequence_parallelism())
    predicted = None if cluster is None else prediction(options, decided, config, cluster)
    faster = ""
    if predicted is not None and not options.names_degrees:
        ways = _by_degree(options, settings, config, predicted.job.cluster, chooser)
        faster = _faster(fastest([way.result for way in ways.values()]), predicted)
    return Sharing(settings=decided, why=why, predicted=predicted, faster=faster)


def forwards_of_step(rows: int | None, num_gpus: int, degree: int) -> int:
    """How many rows each group of `degree` GPUs trains in a step, one after the other.

    Raises ValueError if some groups would have more rows than others.
    """
    at_once = num_gpus // degree
    rows = rows or at_once
    if rows % at_once:
        raise ValueError(
            f"{rows} rows per step with {degree} of {num_gpus} GPUs per row: {at_once} rows are "
            f"trained at once, so a step has a multiple of {at_once}. Use --rows-per-step "
            f"{nearest_multiples(rows, at_once)}, or leave the degrees to `longctx patch`."
        )
    return rows // at_once


class _Predicted(NamedTuple):
    """A way to share rows, and what it takes."""

    settings: Settings
    why: str
    result: Result


def _by_degree(
    options: PatchOptions, settings: Settings, config: Any, cluster: Cluster, chooser: DegreeChooser
) -> dict[int, _Predicted]:
    """The best way for each number of GPUs that may share a row."""
    job = job_of(settings, config, cluster, rows_per_step=options.step_rows)
    found = {}
    for degree in possible_degrees(job):
        way, why = chooser.choose(degree)
        its = _decided(settings, way, job.forwards(degree))
        found[degree] = _Predicted(its, why, run_of(options, its, config, cluster))
    return found


def _faster(best: Result, chosen: Result) -> str:
    """What to add to the command to train as fast as `best`; empty if it is no faster."""
    gpus, degree = best.job.cluster.num_gpus, best.candidate.sequence_degree
    speeds = [each.tokens_per_second_per_gpu * gpus for each in (best, chosen)]
    if not best.fits or speeds[0] <= speeds[1] * (1 + TIE):
        return ""
    return (
        f"Faster: --sequence-degree {degree} is predicted to train {speeds[0]:,.0f} tokens/s in "
        f"place of {speeds[1]:,.0f}, with steps of {best.num_rows} in place of "
        f"{chosen.num_rows} rows."
    )


def degrees_of(options: PatchOptions) -> tuple[int, Way | None]:
    """The GPUs that share a row, and the degrees that were asked for. Raises ValueError for those
    that don't fit."""
    return asked_degrees(
        num_ranks=options.num_gpus,
        num_nodes=options.nodes,
        sequence_degree=options.sequence_degree,
        ulysses=options.ulysses,
        ring=options.ring,
    )


def _chooser(
    options: PatchOptions, settings: Settings, config: Any, cluster: Cluster | None
) -> DegreeChooser:
    kind = MACHINES[settings.hardware] if cluster is None else cluster.hardware
    return DegreeChooser(
        settings=settings,
        facts=ModelFacts.of(config),
        gpus_per_node=options.num_gpus // options.nodes,
        hardware=None if options.cpu else kind,
        recurrent=recurrent_layers(config),
    )


def _decided(settings: Settings, way: Way, forwards: int) -> Settings:
    shared: dict[str, Any] = {"ulysses": way.ulysses, "ring": way.ring}
    shared["layout"] = way.layout or settings.layout
    return dataclasses.replace(settings, gradient_accumulation_steps=forwards, **shared)


def _fastest(
    options: PatchOptions,
    settings: Settings,
    config: Any,
    cluster: Cluster | None,
    chooser: DegreeChooser,
) -> Sharing:
    """The way that is predicted to take the least time for the rows of a step."""
    unpredicted = why_unpredicted(config, is_dpo=options.dpo)
    if cluster is None or unpredicted:
        raise ValueError(_not_predicted(options, unpredicted))
    ways = _by_degree(options, settings, config, cluster, chooser)
    results = [way.result for way in ways.values()]
    best = require_fit(fastest(results))
    chosen = ways[best.candidate.sequence_degree]
    return Sharing(
        settings=chosen.settings,
        why=f"{_why_fastest(best, results)}; {chosen.why}",
        predicted=best,
    )


def _not_predicted(options: PatchOptions, unpredicted: str) -> str:
    if unpredicted:
        why = f"{unpredicted} is not predicted"
    elif options.cpu:
        why = "nothing is predicted for CPUs"
    else:
        why = f"--gpus names no kind of GPU, such as {options.num_gpus}xH200"
    rows, num_gpus = options.step_rows or 1, options.num_gpus
    degrees = (d for d in range(1, num_gpus + 1) if num_gpus % d == 0)
    fitting = next(degree for degree in degrees if rows % (num_gpus // degree) == 0)
    return (
        f"{rows} rows per step without degrees: the way that is predicted fastest is taken, but "
        f"{why}. Say how many GPUs or processes share a row, such as --sequence-degree {fitting}."
    )


def _why_fastest(best: Result, results: list[Result]) -> str:
    degree = best.candidate.sequence_degree
    rows = f"{best.num_rows} row{'s' if best.num_rows > 1 else ''} per step"
    if len(results) == 1:
        return f"no other number of GPUs per row is possible with {rows}"
    return f"of {rows}, {degree} per row predicted fastest ({best.time.total:.3g} s)"


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
