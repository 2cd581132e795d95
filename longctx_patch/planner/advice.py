"""What a run that is under way was predicted to take, and what to change where that is too much."""

from dataclasses import replace

from longctx_patch.planner.machine import GIB, GPUS, Cluster
from longctx_patch.planner.search import Result, longest, search


def cluster_here(
    hardware: str, num_gpus: int, memory_bytes: float, host_bytes: float | None = None
) -> Cluster:
    """GPUs of the kind that a config names, with the memory that torch reports of this one."""
    gpu = replace(GPUS[hardware], memory_bytes=memory_bytes)
    return Cluster(gpu=gpu, num_gpus=num_gpus, host_bytes=host_bytes)


def advice(used: Result) -> str:
    """Flags with which this row is predicted to fit on these GPUs, or how long one would be."""
    job, now = used.job, used.candidate
    fitting = [result for result in search(job) if result.fits]
    same_degree = [r for r in fitting if r.candidate.sequence_degree == now.sequence_degree]
    # What failed once fails again, whatever was predicted of it.
    other = [r for r in same_degree if flags(r) != flags(used)] + [
        r for r in fitting if r.candidate.sequence_degree > now.sequence_degree
    ]
    lighter = [r for r in other if r.memory.total < used.memory.total]
    if lighter:
        best = lighter[0]
        text = f"{flags(best)} is predicted to take {best.memory.total / GIB:.1f} GiB"
        return text + (f" and {best.host_bytes / GIB:.0f} of a host" if best.host_bytes else "")
    return (
        f"the longest row predicted to fit on {job.cluster} has {longest(job):,} tokens: shorten "
        "rows (--seq-len), or share each between more GPUs"
    )


def flags(result: Result) -> str:
    """Of `longctx patch`. The recipe has all but the last, which is the launcher's there."""
    candidate, job = result.candidate, result.job
    what = f"--lora --rank {job.lora_rank}" if job.lora else "--full"
    what += " --load-in-4bit" if job.dtype == "nf4" else f" --dtype {job.dtype}"
    degrees = f"--ulysses {candidate.ulysses} --ring {candidate.ring}"
    text = f"{what} {degrees} --checkpoint {candidate.checkpoint} --mlp-tiles {candidate.mlp_tiles}"
    if candidate.attention_kept < 1:
        text += f" --attention-kept {candidate.attention_kept:g}"
    return text + (" --states-on-host" if candidate.offload_states else "")
