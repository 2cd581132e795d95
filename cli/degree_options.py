"""Degrees of `longctx patch`: those that options name are checked, others are chosen."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.recurrent_layers import RecurrentLayers
from longctx_patch.planner.attention_cost import Workload
from longctx_patch.planner.degrees import Way, costs_of_ways, most_ulysses, preferred
from longctx_patch.planner.job import MOST_GPUS, gpus_together
from longctx_patch.planner.machines import Hardware
from longctx_patch.planner.recurrent_cost import RecurrentWork
from longctx_patch.recipes.settings import Settings
from longctx_patch.rules.world import require_whole_groups
from longctx_patch.sequence.documents import Documents

TYPICAL_TOKENS = 2048
"""Tokens of a document of packed rows, whose lengths are not known before the text is read."""


def asked_degrees(
    *,
    num_ranks: int,
    num_nodes: int = 1,
    sequence_degree: int | None = None,
    ulysses: int | None = None,
    ring: int | None = None,
) -> tuple[int, Way | None]:
    """(How many ranks share a row, by default all; the degrees, None if no option names one).

    Raises ValueError if the degrees' product isn't the sequence degree or doesn't divide the ranks.

    Example:
        >>> asked_degrees(num_ranks=16, ring=2)
        (16, Way(ulysses=8, ring=2, layout=None))
    """
    if num_ranks % num_nodes:
        raise ValueError(
            f"--gpus {num_ranks} over --nodes {num_nodes}: --gpus counts the GPUs of all nodes, so "
            f"it is a multiple of {num_nodes}. Use --gpus {-(-num_ranks // num_nodes) * num_nodes}."
        )
    if ulysses and ring:
        degree = ulysses * ring
        if sequence_degree not in (None, degree):
            raise ValueError(
                f"--ulysses {ulysses} x --ring {ring} = {degree}, but --sequence-degree is "
                f"{sequence_degree}: the degrees must multiply to it. Leave --sequence-degree out."
            )
    else:
        degree = sequence_degree or num_ranks
    _check_divides(degree, num_ranks, ulysses, ring)
    if not (ulysses or ring):
        return degree, None
    ulysses = ulysses or degree // (ring or 1)
    return degree, Way(ulysses, degree // ulysses)


def _check_divides(degree: int, num_ranks: int, ulysses: int | None, ring: int | None) -> None:
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    given = f"--ulysses {ulysses} x --ring {ring}" if ulysses and ring else "--sequence-degree"
    require_whole_groups(given, degree, num_ranks, started=False)
    for name, value in (("ulysses", ulysses), ("ring", ring)):
        if value and degree % value:
            fitting = [d for d in divisors if degree % d == 0]
            raise ValueError(
                f"--{name} {value} with {degree} ranks per sequence: --ulysses x --ring must be "
                f"{degree}. Use --{name} {' or '.join(map(str, fitting))}, or set "
                "--sequence-degree."
            )


@dataclass(frozen=True, kw_only=True)
class DegreeChooser:
    """Chooses the way in which GPUs share the rows of a run."""

    settings: Settings
    """Their degrees are ignored."""
    facts: ModelFacts
    gpus_per_node: int
    hardware: Hardware | None
    """None for CPUs, for which nothing is predicted."""
    recurrent: RecurrentLayers | None = None
    """The model's recurrent layers, if it has some."""

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The lengths of the documents of typical rows; empty for one that is not packed."""
        seq_len = self.settings.seq_len
        if not self.settings.pack:
            return [()]
        short = Documents.typical(seq_len, TYPICAL_TOKENS).lengths
        return [(seq_len,), short] if self.settings.mixture else [short]

    def choose(self, degree: int) -> tuple[Way, str]:
        """The way in which `degree` ranks share a row, and why."""
        if degree == 1:
            return Way(1, 1), "one rank per sequence, so nothing is cut"
        hardware, settings, facts = self.hardware, self.settings, self.facts
        if hardware is None or degree > MOST_GPUS:
            heads, per_node = facts.num_kv_heads, self.gpus_per_node
            way = most_ulysses(degree, num_kv_heads=heads, gpus_per_node=per_node)
            limits = f"the {heads} key-value heads and the {per_node} ranks of a node"
            return way, f"Ulysses as far as it divides {limits}, ring for the rest"
        together = gpus_together(degree, self.gpus_per_node)
        machine = replace(hardware, gpus_per_node=together)
        latents = settings.kv_exchange != "heads"
        layers = _layers(settings.seq_len, facts, self.rows, latents=latents)
        recurrent = self._recurrences()
        config = settings.sequence_parallelism()
        costs = costs_of_ways(layers, machine, degree, config, recurrent)
        return preferred(costs), self._reason()

    def _recurrences(self) -> Counter[RecurrentWork]:
        """How many recurrences there are of each kind, over all rows of the sample."""
        layers = self.recurrent
        if layers is None or layers.recurrence is None:
            return Counter()
        found: Counter[RecurrentWork] = Counter()
        for lengths in self.rows:
            documents = Documents.of_row(lengths, self.settings.seq_len)
            found[RecurrentWork(layers.recurrence, documents)] += layers.num_layers
        return found

    def _reason(self) -> str:
        assert self.hardware is not None
        settings, rows = self.settings, self.rows
        counts = " or ".join(str(len(lengths)) for lengths in rows)
        kinds = [f"rows of {counts} documents"] if settings.pack else []
        reaches = self.facts.reaches_in(settings.seq_len)
        kinds += ["layers with a window"] if any(reach.window for reach in reaches) else []
        kinds += ["layers of chunks"] if any(reach.chunk for reach in reaches) else []
        sources = {self.hardware.recurrent.source(work.shape.kind) for work in self._recurrences()}
        kinds += [f"recurrent layers at rates {source}" for source in sources]
        what = f"{' and '.join(kinds) or 'causal rows'} on {self.hardware.name.upper()}"
        reason = f"predicted fastest for {what}"
        if settings.pack:
            reason += f"; this assumes documents of {TYPICAL_TOKENS:,} tokens"
        return reason


def _layers(
    seq_len: int, facts: ModelFacts, rows: Sequence[tuple[int, ...]], *, latents: bool
) -> Counter[Workload]:
    """How many layers there are of each kind, over all rows of a sample. `latents`: they may travel
    in place of heads."""
    return Counter(
        Workload(
            num_tokens=seq_len,
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            latent_dim=facts.latent_dim if latents else None,
            expansion=facts.expansion if latents else None,
            lengths=_pieces(lengths, seq_len, reach.chunk),
            window=reach.window,
        )
        for lengths in rows
        for reach in facts.reaches_in(seq_len)
    )


def _pieces(lengths: tuple[int, ...], seq_len: int, chunk: int | None) -> tuple[int, ...]:
    """Lengths of what attends by itself: documents, or their chunks."""
    return lengths if chunk is None else Documents.of_row(lengths, seq_len).cut(chunk).lengths
