"""The table of `longctx plan --table` and of docs/reference/models.md: the longest row of a model
on 1 to 8 GPUs of a kind, with the time and memory of a step."""

from dataclasses import dataclass, replace
from typing import Any

from longctx_patch.config import LongContextConfig
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.facts import ModelFacts
from longctx_patch.planner.job import Job, parse_cluster
from longctx_patch.planner.machines import GIB
from longctx_patch.planner.search import Result, fastest_shared, longest

MOST = 2**20
"""Rows are not tried beyond this many tokens, unless the user says so."""
COUNTS = (1, 2, 4, 8)
HOST_GIB, CARD_HOST_GIB = 200, 64
"""Memory of a host for each of its GPUs, where the user names none: beside data centres' GPUs, and
beside cards."""
LEGEND = (
    "A cell has the longest row that fits (+: longer ones were not tried), the seconds of a step "
    "of one row, and the GiB of a GPU + of the host. Hosts are taken to have "
    f"{HOST_GIB} GiB for each H200, H100 or A100 and {CARD_HOST_GIB} for each other card; "
    "`--host-gib` says otherwise. s: with `--states-on-host`. q: with `--load-in-4bit`, where "
    "nothing else fits. <: at most so many seconds, since layers with a window count as full "
    "attention. -: nothing fits."
)


@dataclass(frozen=True)
class Cell:
    """The longest row of a model on some GPUs."""

    gpus: str
    result: Result | None
    """None: not even a short row fits."""
    is_most: bool = False
    """Whether longer rows were not tried."""

    @property
    def text(self) -> str:
        if self.result is None:
            return "-"
        job, candidate = self.result.job, self.result.candidate
        tokens = f"{job.seq_len // 1024}K" if job.seq_len < 2**20 else f"{job.seq_len / 2**20:.3g}M"
        seconds = self.result.time.total
        took = f"{'<' * bool(job.shape.num_windowed_layers)}{seconds:.{1 if seconds < 10 else 0}f}s"
        memory = f"{self.result.memory.total / GIB:.0f}+{self.result.host_bytes / GIB:.0f}"
        marks = "s" * candidate.offload_states + "q" * (job.dtype == "nf4")
        return " ".join(filter(None, (tokens + "+" * self.is_most, took, memory, marks)))

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"gpus": self.gpus, "max_seq_len": 0}
        if (result := self.result) is None:
            return found
        return found | {
            "max_seq_len": result.job.seq_len,
            "is_limited": self.is_most,
            "note": result.job.cluster.hardware.note,
            "step_s": result.time.total,
            "peak_gib": result.memory.total / GIB,
            "host_gib": result.host_bytes / GIB,
            "states_on_host": result.candidate.offload_states,
            "load_in_4bit": result.job.dtype == "nf4",
        }


def cell(job: Job, gpus: str, *, host_gib: float | None = None, most: int = MOST) -> Cell:
    """What `gpus` train of the model of a job, whose own cluster and row don't matter.

    An adapter's frozen weights are of 4 bits where nothing fits without.
    """
    cluster = parse_cluster(gpus, host_gib)
    each = HOST_GIB if cluster.hardware.is_measured else CARD_HOST_GIB
    here = replace(job, cluster=parse_cluster(gpus, host_gib or each * cluster.num_gpus))
    narrow = [replace(here, dtype="nf4", fsdp=False)] if job.lora else []
    for tried in (here, *narrow):
        if tokens := longest(tried, most):
            result = fastest_shared(replace(tried, seq_len=tokens))
            return Cell(gpus, result, is_most=tokens + 1024 > most)
    return Cell(gpus, None)


def counts_of(gpus: str) -> list[int]:
    """The columns for what --gpus says: `H100` has 1, 2, 4 and 8, `4xH100` 1, 2 and 4."""
    most = parse_cluster(gpus).num_gpus if gpus.strip()[:1].isdigit() else COUNTS[-1]
    return sorted({*(number for number in COUNTS if number < most), most})


def why_not(config: Any) -> str:
    """Says what of a model is not predicted; empty if it is."""
    check_model_config(config, LongContextConfig())
    unpredicted = ModelFacts.of(config).unpredicted
    return f"not predicted: {unpredicted}" if unpredicted else ""
