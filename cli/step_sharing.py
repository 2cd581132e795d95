"""How the GPUs of a run folder share the rows of a step: as asked, or as is predicted fastest."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from longctx_patch.cli.degree_options import DegreeChooser, asked_degrees
from longctx_patch.cli.patch_options import PatchOptions
from longctx_patch.cli.prediction import prediction, require_fit, run_of, why_unpredicted
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.planner.advice import fastest
from longctx_patch.planner.degrees import TIE, Way
from longctx_patch.planner.job import Cluster, nearest_multiples
from longctx_patch.planner.machines import MACHINES
from longctx_patch.planner.search import Result, possible_degrees
from longctx_patch.recipes.memory_report import job_of
from longctx_patch.recipes.settings import Settings


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
