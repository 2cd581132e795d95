"""Decides how the GPUs of a run folder share the rows of a step: as asked, or as is predicted
fastest; and predicts memory and time, where --gpus names a kind."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from longctx_patch.cli.arguments import asked_degrees
from longctx_patch.cli.patch_options import PatchOptions
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.planner.advice import advice, fastest, in_4_bits
from longctx_patch.planner.attention_cost import Workload
from longctx_patch.planner.degrees import TIE, Way, costs_of_ways, most_ulysses, preferred
from longctx_patch.planner.job import (
    MOST_GPUS,
    Cluster,
    gpus_together,
    nearest_multiples,
    parse_cluster,
)
from longctx_patch.planner.machines import MACHINES, Hardware
from longctx_patch.planner.recurrent_cost import RecurrentWork
from longctx_patch.planner.search import Result, possible_degrees
from longctx_patch.recipes.memory_report import job_of, predict_run
from longctx_patch.recipes.settings import Settings
from longctx_patch.sequence.documents import Documents

PAIRS = "what pairs and their reference take"
TYPICAL_TOKENS = 2048
"""Tokens of a document of packed rows, whose lengths are not known before the text is read."""


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


class _Predicted(NamedTuple):
    """A way to share rows, and what it takes."""

    settings: Settings
    why: str
    result: Result


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


@dataclass(frozen=True, kw_only=True)
class Sharer:
    """Decides how many GPUs share each row of a run, in which way, and how many rows each trains in
    a step."""

    options: PatchOptions
    settings: Settings
    """Their degrees are ignored."""
    config: Any
    """The config of the model that is trained."""
    cluster: Cluster | None
    """None if --gpus names no kind."""

    def share(self) -> Sharing:
        """Decide. Raises ValueError for degrees that don't fit, and for a run that is predicted not
        to fit."""
        options = self.options
        if options.step_rows is not None and not options.names_degrees:
            return self._fastest()
        degree, asked = degrees_of(options)
        forwards = self._forwards(degree)
        way, why = (asked, "as asked") if asked else self._choose(degree)
        decided = self._decided(way, forwards)
        check_model_config(self.config, decided.sequence_parallelism())
        predicted, faster = self._prediction(decided), ""
        if predicted is not None and not options.names_degrees:
            faster = _faster(fastest([way.result for way in self._by_degree.values()]), predicted)
        return Sharing(settings=decided, why=why, predicted=predicted, faster=faster)

    def _fastest(self) -> Sharing:
        """The way that is predicted to take the least time for the rows of a step."""
        unpredicted = why_unpredicted(self.config, is_dpo=self.options.dpo)
        if self.cluster is None or unpredicted:
            raise ValueError(_not_predicted(self.options, unpredicted))
        results = [way.result for way in self._by_degree.values()]
        best = _require_fit(fastest(results))
        chosen = self._by_degree[best.candidate.sequence_degree]
        why = f"{_why_fastest(best, results)}; {chosen.why}"
        return Sharing(settings=chosen.settings, why=why, predicted=best)

    def _forwards(self, degree: int) -> int:
        """Counts how many rows each group of `degree` GPUs trains in a step, one after the other.

        Raises ValueError if some groups would have more rows than others.
        """
        num_gpus, at_once = self.options.num_gpus, self.options.num_gpus // degree
        rows = self.options.step_rows or at_once
        if rows % at_once:
            raise ValueError(
                f"{rows} rows per step with {degree} of {num_gpus} GPUs per row: {at_once} rows "
                f"are trained at once, so a step has a multiple of {at_once}. Use --rows-per-step "
                f"{nearest_multiples(rows, at_once)}, or leave the degrees to `longctx patch`."
            )
        return rows // at_once

    def _decided(self, way: Way, forwards: int) -> Settings:
        shared: dict[str, Any] = {"ulysses": way.ulysses, "ring": way.ring}
        shared["layout"] = way.layout or self.settings.layout
        return dataclasses.replace(self.settings, gradient_accumulation_steps=forwards, **shared)

    @cached_property
    def _by_degree(self) -> dict[int, _Predicted]:
        """The best way for each number of GPUs that may share a row."""
        assert self.cluster is not None
        rows = self.options.step_rows
        job = job_of(self.settings, self.config, self.cluster, rows_per_step=rows)
        found = {}
        for degree in possible_degrees(job):
            way, why = self._choose(degree)
            its = self._decided(way, job.forwards(degree))
            found[degree] = _Predicted(its, why, self._run(its))
        return found

    def _run(self, settings: Settings) -> Result:
        """Returns what a run with these settings takes."""
        on_host, rows = self.options.states_on_host, self.options.step_rows
        assert self.cluster is not None
        return predict_run(
            settings, self.config, self.cluster, states_on_host=on_host, rows_per_step=rows
        )

    def _prediction(self, settings: Settings) -> Result | None:
        """Returns what the run is predicted to take; None where it is not (`why_unpredicted`).

        Raises ValueError where the run is predicted not to fit, with what to change.
        """
        if self.cluster is None:
            return None
        if why := why_unpredicted(self.config, is_dpo=self.options.dpo):
            if self.cluster.host_bytes is not None:
                raise ValueError(
                    f"--host-gib {self.cluster.host_bytes / 2**30:g}: {why} is not predicted, so "
                    "that nothing could be compared with it. Leave it out."
                )
            return None
        return _require_fit(self._run(settings))

    def _choose(self, degree: int) -> tuple[Way, str]:
        """The way in which `degree` ranks share a row, and why."""
        if degree == 1:
            return Way(1, 1), "one rank per sequence, so nothing is cut"
        per_node = self.options.num_gpus // self.options.nodes
        if (hardware := self._hardware) is None or degree > MOST_GPUS:
            heads = self._facts.num_kv_heads
            way = most_ulysses(degree, num_kv_heads=heads, gpus_per_node=per_node)
            limits = f"the {heads} key-value heads and the {per_node} ranks of a node"
            return way, f"Ulysses as far as it divides {limits}, ring for the rest"
        machine = dataclasses.replace(hardware, gpus_per_node=gpus_together(degree, per_node))
        config = self.settings.sequence_parallelism()
        costs = costs_of_ways(self._layers, machine, degree, config, self._recurrences)
        return preferred(costs), self._reason(hardware)

    @cached_property
    def _facts(self) -> ModelFacts:
        return ModelFacts.of(self.config)

    @property
    def _hardware(self) -> Hardware | None:
        """None for CPUs, for which nothing is predicted."""
        if self.options.cpu:
            return None
        return MACHINES[self.settings.hardware] if self.cluster is None else self.cluster.hardware

    @property
    def _rows(self) -> list[tuple[int, ...]]:
        """The lengths of the documents of typical rows; empty for one that is not packed."""
        seq_len = self.settings.seq_len
        if not self.settings.pack:
            return [()]
        short = Documents.typical(seq_len, TYPICAL_TOKENS).lengths
        return [(seq_len,), short] if self.settings.mixture else [short]

    @property
    def _layers(self) -> Counter[Workload]:
        """Counts how many layers there are of each kind, over all rows of the sample."""
        facts, seq_len = self._facts, self.settings.seq_len
        latents = self.settings.kv_exchange != "heads"
        return Counter(
            Workload(
                num_tokens=seq_len,
                num_heads=facts.num_heads,
                num_kv_heads=facts.num_kv_heads,
                head_dim=facts.head_dim,
                latent_dim=facts.latent_dim if latents else None,
                expansion=facts.expansion if latents else None,
                lengths=lengths
                if reach.chunk is None
                else Documents.of_row(lengths, seq_len).cut(reach.chunk).lengths,
                window=reach.window,
            )
            for lengths in self._rows
            for reach in facts.reaches_in(seq_len)
        )

    @property
    def _recurrences(self) -> Counter[RecurrentWork]:
        """Counts how many recurrences there are of each kind, over all rows of the sample."""
        layers, found = recurrent_layers(self.config), Counter[RecurrentWork]()
        if layers is not None and layers.recurrence is not None:
            for lengths in self._rows:
                documents = Documents.of_row(lengths, self.settings.seq_len)
                found[RecurrentWork(layers.recurrence, documents)] += layers.num_layers
        return found

    def _reason(self, hardware: Hardware) -> str:
        counts = " or ".join(str(len(lengths)) for lengths in self._rows)
        kinds = [f"rows of {counts} documents"] if self.settings.pack else []
        reaches = self._facts.reaches_in(self.settings.seq_len)
        kinds += ["layers with a window"] if any(reach.window for reach in reaches) else []
        kinds += ["layers of chunks"] if any(reach.chunk for reach in reaches) else []
        sources = {hardware.recurrent.source(work.shape.kind) for work in self._recurrences}
        kinds += [f"recurrent layers at rates {source}" for source in sources]
        what = f"{' and '.join(kinds) or 'causal rows'} on {hardware.name.upper()}"
        assumed = f"; this assumes documents of {TYPICAL_TOKENS:,} tokens"
        return f"predicted fastest for {what}{assumed * self.settings.pack}"


def _faster(best: Result, chosen: Result) -> str:
    """Returns what to add to the command to train as fast as `best`; empty if it is no faster."""
    gpus, degree = best.job.cluster.num_gpus, best.candidate.sequence_degree
    speeds = [each.tokens_per_second_per_gpu * gpus for each in (best, chosen)]
    if not best.fits or speeds[0] <= speeds[1] * (1 + TIE):
        return ""
    return (
        f"Faster: --sequence-degree {degree} is predicted to train {speeds[0]:,.0f} tokens/s in "
        f"place of {speeds[1]:,.0f}, with steps of {best.num_rows} in place of "
        f"{chosen.num_rows} rows."
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


def cluster_of(options: PatchOptions) -> Cluster | None:
    """The GPUs that --gpus names, spread evenly over the machines; None if it names no kind.

    Raises ValueError for more GPUs than a machine has, and for --host-gib where nothing is
    predicted that could be compared with it.
    """
    gpus, num_gpus, nodes = options.gpus, options.num_gpus, options.nodes
    host_gib = options.host_gib
    if gpus.isdigit() or options.cpu:
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
    """Names what the prediction of a run leaves out, such as the experts of its model; empty if it
    has all."""
    facts = ModelFacts.of(config)
    found = facts.unpredicted
    if found and found == facts.unmeasured:  # "layer 0 is mamba" is no option
        found = f"the recurrence ({found})"
    return f"what {found} takes" if found else PAIRS if is_dpo else ""


def _require_fit(result: Result) -> Result:
    """Raise ValueError where a run is predicted not to fit, with what to change."""
    if not result.fits:
        raise ValueError(
            f"--gpus {result.job.cluster}: the run {result.reason}. {advice(result)}."
            f"{in_4_bits(result)} `longctx plan` compares more; with the number of GPUs alone "
            "nothing is predicted."
        )
    return result
