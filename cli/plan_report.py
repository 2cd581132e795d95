"""Writes what `longctx plan` prints: a table, or JSON."""

from collections.abc import Sequence
from typing import Any

from longctx_patch.memory.policies import POLICIES, count_on_host, describe_layers
from longctx_patch.planner.advice import flags
from longctx_patch.planner.degrees import TIE
from longctx_patch.planner.job import Job
from longctx_patch.planner.machines import GIB
from longctx_patch.planner.search import MARGIN, Result, left_out, usable_bytes
from longctx_patch.planner.step_memory import how_loaded
from longctx_patch.rules.text_table import aligned

TABLE_ROWS = 12
OTHERS = (
    "shorter rows, more GPUs, a host with more memory (--host-gib), weights in 16 or 4 bits "
    "(--dtype bfloat16, --load-in-4bit), or an adapter in place of every weight (--lora)"
)
MEANINGS = {
    "sp": "GPUs that share a row, by Ulysses x a ring",
    "checkpoint": "how much of a layer is recomputed in backward (none: nothing; attention: all "
    "but attention; offload: the same, with what layers keep in host memory; full: everything)",
    "tiles": "parts in which an MLP runs",
    "rows": "rows trained at once",
    "forwards": "rows that each group of GPUs trains in a step, one after the other",
    "MFU": "share of the GPU's peak, without recompute",
}
"""What the columns of the table are."""
MIXED = (
    "A step has the rows that are trained at once, so that s/step is the time of other work where",
    "rows differ: the order is by tokens/s. --rows-per-step N compares steps of the same rows.",
)
COMPONENTS = {
    "checkpoints": "what layers keep for backward",
    "layer": "the layer that is being computed",
    "attention": "buffers of its backward",
    "communication": "what arrives and leaves",
    "logits": "a chunk of the loss",
}
"""Explanations of those memory components whose names don't say enough."""
_HEADER = (
    *("sp (ulysses x ring)", "plan", "checkpoint", "tiles", "peak GiB", "host GiB"),
    *("s/step", "rows", "forwards", "tokens/s/GPU", "MFU"),
)


def as_json(results: Sequence[Result], max_seq_len: int) -> dict[str, Any]:
    """All candidates of a job, in types that JSON has. GiB are 2**30 bytes; `host_gib` is that of
    one machine."""
    job = results[0].job
    return {
        "model": job.shape.name,
        "gpus": str(job.cluster),
        "note": job.cluster.hardware.note,
        "seq_len": job.seq_len,
        "rows_per_step": job.rows_per_step,
        "recurrent_layers": job.shape.num_recurrent,
        "left_out": {str(degree): reason for degree, reason in left_out(job).items()},
        "candidates": [_candidate(result) for result in results],
        "max_seq_len": max_seq_len,
    }


def render(results: Sequence[Result], max_seq_len: int, reach: int | None = None) -> str:
    """The best candidates as a table, the components of the best, and why others don't fit."""
    job = results[0].job
    fitting = fastest_of_each([result for result in results if result.fits])
    how = f"LoRA of rank {job.lora_rank} (--full: every weight)" if job.lora else "every weight"
    where = "sharded over all GPUs" if job.num_shards > 1 else "a whole copy on each GPU"
    how += f", loaded in {job.dtype}, {where}"
    rows = f"{job.rows_per_step} rows a step, each" if job.rows_per_step else "rows"
    lines = [f"{job.shape.name} on {job.cluster}, {rows} of {job.seq_len:,} tokens, {how}."]
    note = job.cluster.hardware.note
    lines += [f"{job.cluster.hardware.name.upper()}: {note}.", ""] if note else [""]
    if fitting:
        lines += aligned([_columns(job, _HEADER), *(_row(r) for r in fitting[:TABLE_ROWS])])
        more = len(fitting) - TABLE_ROWS
        lines += [f"and {more} more that fit"] if more > 0 else []
        lines += [text for result in fitting[:TABLE_ROWS] if (text := _choice_by_layer(result))]
        lines += [
            "(The fastest for each number of GPUs that share a row and each checkpoint policy;",
            f"--json lists all. Speeds within {TIE:.1%} count as equal: of these, states that stay",
            "on the GPUs come first, then the least host memory.)",
            "",
        ]
        lines += [f"{name}: {MEANINGS[name]}." for name in _columns(job, tuple(MEANINGS))]
        lines += MIXED if len({result.num_rows for result in fitting}) > 1 else ()
        lines += ["", f"The first: {flags(fitting[0])}", *_parts(fitting[0])]
    else:
        lines += ["Nothing fits."]
    left = left_out(job)
    if left:
        lines += ["", "Not listed:", *(f"  sp {degree}: {left[degree]}" for degree in left)]
    refused = [result for result in results if not result.fits]
    if refused:
        lines += ["", f"{len(refused)} do not fit; the nearest:"]
        lines += [f"  {_name(result)}: {result.reason}" for result in refused[:3]]
    if not fitting:
        lines += ["", f"What may fit: {OTHERS}."]
    unchecked = "" if job.cluster.host_bytes else ", if host memory were unlimited (see --host-gib)"
    lines += ["", f"Longest row that fits: {max_seq_len:,} tokens{unchecked}."]
    if reach is not None and job.seq_len > reach:
        lines += [
            f"The model as published reaches {reach:,}: scale its RoPE with `longctx patch "
            "--rope`, which also replaces a scaling that it has."
        ]
    lines += window_note(job)
    if job.shape.num_recurrent:
        source = job.cluster.hardware.recurrent.source("delta rule")
        lines += [
            f"{job.shape.num_recurrent} of {job.shape.num_layers} layers are recurrent (gated "
            f"delta nets): rates of their kernels are {source}."
        ]
    return "\n".join(lines)


def window_note(job: Job) -> list[str]:
    """Says what is not predicted of layers with a window."""
    if not (number := job.shape.num_windowed_layers):
        return []
    return [
        f"{number} layers have a sliding window and are counted as full attention: times are upper "
        "bounds."
    ]


def fastest_of_each(results: Sequence[Result]) -> list[Result]:
    """Keep the first candidate of each sequence degree and checkpoint policy."""
    found: dict[tuple[int, str], Result] = {}
    for result in results:
        candidate = result.candidate
        found.setdefault((candidate.sequence_degree, candidate.checkpoint), result)
    return list(found.values())


def _columns(job: Job, names: tuple[str, ...]) -> tuple[str, ...]:
    """Without `forwards` where a step has one."""
    return names if job.rows_per_step else tuple(name for name in names if name != "forwards")


def _candidate(result: Result) -> dict[str, Any]:
    candidate = result.candidate
    return {
        "fits": result.fits,
        "reason": result.reason,
        "sp": candidate.sequence_degree,
        "fsdp": result.job.cluster.num_gpus if result.job.fsdp else 1,
        "ulysses": candidate.ulysses,
        "ring": candidate.ring,
        "plan": candidate.plan if candidate.sequence_degree > 1 else None,
        "checkpoint": candidate.checkpoint,
        "layers": {
            name: candidate.policies.count(name) for name in dict.fromkeys(candidate.policies)
        },
        "attention_kept": candidate.attention_kept,
        "mlp_tiles": candidate.mlp_tiles,
        "offload": _offload(result),
        "peak_gib": result.memory.total / GIB,
        "components_gib": {name: value / GIB for name, value in result.memory.parts().items()},
        "kept_free_gib": usable_bytes(result.job) / (1 - MARGIN) * MARGIN / GIB,
        "host_gib": result.host_bytes / GIB,
        "loading_host_gib": result.loading_bytes / GIB,
        "rows_at_once": result.rows_at_once,
        "forwards": result.forwards,
        "step_s": result.time.total,
        "parts_s": result.time.parts(),
        "flags": flags(result),
        "tokens_per_second_per_gpu": result.tokens_per_second_per_gpu,
        "mfu": result.mfu,
    }


def _offload(result: Result) -> str:
    """Returns which parts of the training are in host memory."""
    parts = ["checkpoints"] if count_on_host(result.candidate.policies) else []
    parts += ["states"] if result.candidate.offload_states else []
    return " and ".join(parts) or "none"


def _choice_by_layer(result: Result) -> str:
    """Returns what the layers do under a policy that chooses by layer; empty under the others."""
    candidate = result.candidate
    if not POLICIES[candidate.checkpoint].chooses_by_layer:
        return ""
    degree, layers = candidate.sequence_degree, describe_layers(candidate.policies)
    return f"{candidate.checkpoint} with sp {degree}: {layers}."


def _checkpoint(result: Result) -> str:
    candidate = result.candidate
    kept = candidate.attention_kept
    text = candidate.checkpoint
    return text if kept == 1 else f"{text}, attention of {kept:.0%} kept"


def _name(result: Result) -> str:
    """A candidate in a few words, for those that don't fit."""
    candidate = result.candidate
    name = f"sp {candidate.sequence_degree}, checkpoint {_checkpoint(result)}"
    name += f", {candidate.mlp_tiles} tile{'s' if candidate.mlp_tiles > 1 else ''}"
    return name + (", states on the host" if candidate.offload_states else "")


def _row(result: Result) -> tuple[str, ...]:
    candidate = result.candidate
    degrees = f"{candidate.sequence_degree}"
    if candidate.sequence_degree > 1:
        degrees += f" ({candidate.ulysses} x {candidate.ring})"
    return (
        degrees,
        candidate.plan if candidate.sequence_degree > 1 else "-",
        _checkpoint(result) + (", states on the host" if candidate.offload_states else ""),
        f"{candidate.mlp_tiles}",
        f"{result.memory.total / GIB:.1f}",
        f"{result.host_bytes / GIB:.0f}",
        f"{result.time.total:.2f}",
        f"{result.rows_at_once}",
        *([f"{result.forwards}"] if result.job.rows_per_step else []),
        f"{result.tokens_per_second_per_gpu:,.0f}",
        f"{result.mfu:.1%}",
    )


def _parts(result: Result) -> list[str]:
    usable = usable_bytes(result.job) / GIB
    lines = [f"takes, in GiB of one GPU ({usable:.0f} may be taken):"]
    for name, value in result.memory.parts().items():
        if value:
            meaning = f"  {COMPONENTS[name]}" if name in COMPONENTS else ""
            lines.append(f"  {name:<16}{value / GIB:7.1f}{meaning}")
    seconds = {name: value for name, value in result.time.parts().items() if value}
    lines += ["and seconds of a step:"]
    lines += [f"  {name:<16}{value:7.2f}" for name, value in seconds.items()]
    loading = f"{result.loading_bytes / GIB:.1f} GiB of a host ({how_loaded(result.job)})"
    return [*lines, f"Loading takes {loading}."]
