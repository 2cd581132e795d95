"""How many GPUs may share a row, and why other numbers may not."""

from longctx_patch.predict.run.candidate import Job


def possible_degrees(job: Job) -> list[int]:
    """Numbers of GPUs that may share a row: their groups lie within nodes or take whole nodes, and
    all groups train as many rows in a step.

    Raises ValueError if there is none, which takes more GPUs than a row has tokens.
    """
    left = left_out(job)
    found = [degree for degree in _divisors(job) if degree not in left]
    if not found:
        reasons = "; ".join(f"{degree}: {reason}" for degree, reason in left.items())
        raise ValueError(
            f"rows of {job.seq_len} tokens on {job.cluster}: no number of GPUs may share a row "
            f"({reasons}). Use fewer GPUs, or another number of rows per step."
        )
    return found


def left_out(job: Job) -> dict[int, str]:
    """Why some divisors of the number of GPUs are no such numbers."""
    found = {degree: _problem(job, degree) for degree in _divisors(job)}
    return {degree: problem for degree, problem in found.items() if problem is not None}


def _divisors(job: Job) -> list[int]:
    num_gpus = job.cluster.num_gpus
    return [d for d in range(1, min(num_gpus, job.seq_len) + 1) if num_gpus % d == 0]


def _problem(job: Job, degree: int) -> str | None:
    per_node, at_once = job.cluster.gpus_per_node, job.replicas(degree)
    if not job.cluster.fills_nodes(degree):
        return f"groups of {degree} GPUs would lie across nodes of {per_node}"
    if not job.divides(degree):
        return f"{at_once} rows at once don't divide {job.rows_per_step} rows a step"
    return None
