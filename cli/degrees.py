"""Choose Ulysses and ring degrees for a model. Pure arithmetic; imports nothing of ours."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DegreeChoice:
    """Degrees, and why."""

    ulysses: int
    ring: int
    reason: str
    layout: str = "auto"
    """Placement of tokens, as the recipe's settings name it."""

    @property
    def sequence_degree(self) -> int:
        return self.ulysses * self.ring


def choose_degrees(
    *,
    num_ranks: int,
    num_nodes: int = 1,
    num_kv_heads: int,
    sequence_degree: int | None = None,
    ulysses: int | None = None,
    ring: int | None = None,
) -> DegreeChoice:
    """Degrees for a job of `num_ranks` processes over `num_nodes` machines.

    What is given is kept. Without any, all ranks share one sequence. Ulysses gets as many ranks
    as divide the key-value heads, so that no head is sent twice, within one node; ring the rest.

    Raises ValueError for degrees that don't multiply to each other or to the number of ranks.

    Example:
        >>> choose_degrees(num_ranks=16, num_nodes=2, num_kv_heads=8).ulysses
        8
    """
    given = {"gpus": num_ranks, "nodes": num_nodes, "sequence-degree": sequence_degree}
    for name, value in {**given, "ulysses": ulysses, "ring": ring}.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: a number of ranks, 1 or more.")
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
    if ulysses or ring:
        ulysses = ulysses or degree // (ring or 1)
        return DegreeChoice(ulysses=ulysses, ring=degree // ulysses, reason="as asked")
    return _default(degree, num_ranks // num_nodes, num_kv_heads)


def _check_divides(degree: int, num_ranks: int, ulysses: int | None, ring: int | None) -> None:
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    if num_ranks % degree:
        parts = f" (--ulysses {ulysses} x --ring {ring})" if ulysses and ring else ""
        raise ValueError(
            f"{degree} ranks per sequence{parts} on --gpus {num_ranks}: the sequence degree must "
            f"divide the number of GPUs. Use one of {', '.join(map(str, divisors))}."
        )
    for name, value in (("ulysses", ulysses), ("ring", ring)):
        if value and degree % value:
            fitting = [d for d in divisors if degree % d == 0]
            raise ValueError(
                f"--{name} {value} with {degree} ranks per sequence: --ulysses x --ring must be "
                f"{degree}. Use --{name} {' or '.join(map(str, fitting))}, or set "
                "--sequence-degree."
            )


def _default(degree: int, ranks_per_node: int, num_kv_heads: int) -> DegreeChoice:
    ulysses = max(
        d
        for d in range(1, degree + 1)
        if degree % d == 0 and num_kv_heads % d == 0 and ranks_per_node % d == 0
    )
    ring = degree // ulysses
    reason = "Ulysses over all ranks: each gets whole key-value heads"
    if degree == 1:
        reason = "one rank per sequence, so nothing is cut"
    elif ulysses == 1:
        reason = f"ring over all ranks: no larger degree divides {num_kv_heads} key-value heads"
    elif ring > 1:
        reason = (
            f"Ulysses up to {ulysses}, which divides the {num_kv_heads} key-value heads and the "
            f"{ranks_per_node} ranks of a node; ring for the rest"
        )
    return DegreeChoice(ulysses=ulysses, ring=ring, reason=reason)
