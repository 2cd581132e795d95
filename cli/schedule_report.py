"""What `longctx schedule` prints of one plan."""

from longctx_patch.cli.text_table import size_text
from longctx_patch.cli.timeline import time_text
from longctx_patch.plans.generators.table import SPARSE_PLAN
from longctx_patch.predict.attention.costs import Prediction, Workload
from longctx_patch.predict.machines import Hardware


def describe(workload: Workload, hardware: Hardware) -> str:
    """What was assumed, on one line."""
    batch = f"batch {workload.batch}, " if workload.batch > 1 else ""
    heads = f"{workload.num_heads} / {workload.num_kv_heads} heads of {workload.head_dim}"
    heads += f", latents of {workload.latent_dim}" if workload.latent_dim else ""
    seen = f", {len(workload.lengths)} documents" if len(workload.lengths) > 1 else ""
    seen += f", a window of {workload.window:,}" if workload.window else ""
    on = f"{hardware.name} with {hardware.kernels.of(workload.head_dim).kernel}"
    return f"{batch}{workload.num_tokens:,} tokens{seen}, {heads}, bfloat16, {on}"


def render(prediction: Prediction, caption: str) -> str:
    """A few lines for people."""
    degrees = f"Ulysses {prediction.ulysses_degree}, " if prediction.ulysses_degree > 1 else ""
    rows = [
        ("makespan", time_text(prediction.makespan_s), "until the last rank is done"),
        (
            "exposed",
            time_text(prediction.exposed_communication_s),
            "lost to messages: waiting, and kernels slower beside them",
        ),
        ("sent", _range([size_text(n) for n in _ends(prediction.bytes_sent_per_rank)]), "per rank"),
        ("messages", _range([str(n) for n in _ends(prediction.messages_per_rank)]), "per rank"),
        ("buffers", size_text(prediction.peak_buffer_bytes), "at most"),
    ]
    width = max(len(value) for _, value, _ in rows)
    return "\n".join(
        [
            f"{prediction.plan} {prediction.direction.value} over {prediction.ranks} ranks "
            f"({degrees}{prediction.layout} tokens)",
            caption,
            "",
            *(f"{name:<9} {value:>{width}}  {why}".rstrip() for name, value, why in rows),
            "",
            balance_text(prediction),
        ]
    )


def balance_text(prediction: Prediction) -> str:
    """How evenly work is split, and how long GPUs wait in practice.

    Ranks of SPARSE_PLAN, which sends only what some query sees, don't go step by step, so that an
    imbalance by steps would say nothing of them.
    """
    waiting = f"Waiting in practice: {prediction.waiting_fraction:.1%} of the GPUs' time."
    if prediction.plan == SPARSE_PLAN:
        return waiting
    imbalance = prediction.idle_fraction
    evenly = "evenly" if imbalance < 0.005 else "unevenly"
    return f"Work is split {evenly} ({imbalance:.1%} imbalance). {waiting}"


def _ends(values: tuple[int, ...]) -> tuple[int, int]:
    return min(values), max(values)


def _range(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)
