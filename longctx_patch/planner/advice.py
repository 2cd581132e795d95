"""Says what a running job was predicted to take, and what to change where that is too much."""

from collections.abc import Sequence
from dataclasses import replace

from longctx_patch.config import HardwareName
from longctx_patch.planner.degrees import TIE
from longctx_patch.planner.job import Cluster
from longctx_patch.planner.machines import GIB, MACHINES
from longctx_patch.planner.search import Result, longest, search, usable_bytes


def fastest(results: Sequence[Result]) -> Result:
    """The fastest way that fits; where none does, the one that is nearest to fitting.

    Of ways that are as fast within `TIE`, the one wins that takes the least host memory, as in
    `search`, then the one in which fewest GPUs share a row: messages that are hidden today are the
    first to show on a slower link.
    """
    fitting = [result for result in results if result.fits]
    if not fitting:
        return min(results, key=lambda result: result.shortfall)
    most = max(result.tokens_per_second_per_gpu for result in fitting)
    tied = [r for r in fitting if most <= r.tokens_per_second_per_gpu * (1 + TIE)]
    return min(tied, key=lambda result: (result.host_bytes, result.candidate.sequence_degree))


def cluster_here(
    hardware: HardwareName, num_gpus: int, memory_bytes: float, host_bytes: float | None = None
) -> Cluster:
    """GPUs of the kind that a config names, with the memory that torch reports of this one."""
    here = replace(MACHINES[hardware], memory_bytes=memory_bytes)
    return Cluster(hardware=here, num_gpus=num_gpus, host_bytes=host_bytes)


def advice(used: Result) -> str:
    """Flags with which this row is predicted to fit on these GPUs, or the longest row that fits."""
    job, now = used.job, used.candidate
    fitting = [result for result in search(job) if result.fits]
    same_degree = [r for r in fitting if r.candidate.sequence_degree == now.sequence_degree]
    # Flags that failed once will fail again, whatever was predicted.
    other = [r for r in same_degree if flags(r) != flags(used)] + [
        r for r in fitting if r.candidate.sequence_degree > now.sequence_degree
    ]
    if not used.fits and used.memory.total <= usable_bytes(job):  # the host is too small
        lighter = [r for r in other if r.host_bytes < used.host_bytes]
    else:
        lighter = [r for r in other if r.memory.total < used.memory.total]
    if lighter:
        best = lighter[0]
        again = best.forwards != used.forwards and job.rows_per_step is not None
        how = f"{flags(best)}, with {best.forwards} forwards a step," if again else flags(best)
        text = f"{how} is predicted to take {best.memory.total / GIB:.1f} GiB"
        return text + (f" and {best.host_bytes / GIB:.0f} of a host" if best.host_bytes else "")
    most = longest(job)
    if not most:
        others = "use more GPUs" if job.lora else "train an adapter (--lora), or use more GPUs"
        return f"no row is predicted to fit on {job.cluster}: {others}, or a host with more memory"
    return (
        f"the longest row predicted to fit on {job.cluster} has {most:,} tokens, with what "
        "`longctx plan` lists: shorten rows (--seq-len), or share each between more GPUs"
    )


def in_4_bits(used: Result) -> str:
    """A sentence, after a space, on an adapter over weights of 4 bits that is predicted to fit
    where `used` doesn't; empty where there is none."""
    job = used.job
    if not job.lora or job.dtype == "nf4":
        return ""
    best = search(replace(job, dtype="nf4", fsdp=False))[0]
    return f" {flags(best)} is predicted to fit." if best.fits else ""


def flags(result: Result) -> str:
    """The options of `longctx patch`. The recipe has them too, but calls `--rank` `--lora-rank`,
    and `--states-on-host` is the launcher's."""
    candidate, job = result.candidate, result.job
    what = f"--lora --rank {job.lora_rank}" if job.lora else "--full"
    what += f" --also-train {','.join(job.also_train)}" if job.also_train else ""
    what += " --load-in-4bit" if job.dtype == "nf4" else f" --dtype {job.dtype}"
    degrees = f"--ulysses {candidate.ulysses} --ring {candidate.ring}"
    text = f"{what} {degrees} --checkpoint {candidate.checkpoint} --mlp-tiles {candidate.mlp_tiles}"
    if candidate.attention_kept < 1:
        text += f" --attention-kept {candidate.attention_kept:g}"
    return text + (" --states-on-host" if candidate.offload_states else "")
