"""Write docs/reference/models.md: `python -m docs.make_models`, or `make models` (ten minutes).

Every cell is a prediction by `longctx plan --table`. tests/docs/test_models.py computes a few anew.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from longctx_patch.cli.plan import PlanOptions
from longctx_patch.cli.plan_table import COUNTS, LEGEND, cell, why_not
from longctx_patch.planner.job import Job
from longctx_patch.planner.machines import MACHINES
from longctx_patch.planner.named_models import NAMED, NamedModel

PAGE = Path(__file__).parent / "reference" / "models.md"
KINDS = ("H200", "H100", "L40S", "RTX5090", "RTX4090")
INTRO = """<!-- made by docs/make_models.py: change the code, then run `make models` -->
# Models, GPUs and the longest rows

All numbers are [predictions](../results/planner.md). `longctx plan` prints such tables for your
GPUs, model and host, and with `--seq-len` alone the command that makes the run folder:

```
longctx plan --table --gpus 8xH100
longctx plan Qwen/Qwen3-32B --table --seq-len 128K     # which GPUs train such rows?
longctx plan Qwen/Qwen3-32B --gpus 8xH100 --seq-len 128K --rows-per-step 1 --host-gib 1600
```"""
BELOW = (
    "\\*: steps of layers of these sizes were measured on this kind of GPU, and agreed with their "
    "predictions ([how nearly](../results/planner.md)). Rows longer than a model was trained on "
    "need `--rope`. Steps of Qwen3-30B-A3B were measured with LoRA alone."
)


def parts() -> tuple[str, ...]:
    """What stands above and below the tables."""
    others = [f"{m.name} ({why.partition(': ')[2]})" for m in NAMED.values() if (why := _why(m))]
    return INTRO, LEGEND, BELOW, f"{_ratios()}\n\nNot predicted: {', '.join(others)}."


def _why(model: NamedModel) -> str:
    return why_not(model.config())


def _ratios() -> str:
    """What the tables say of GPUs with as much memory."""
    h100, a100 = MACHINES["h100"], MACHINES["a100"]
    rates = [h100.matmul_flops / a100.matmul_flops]
    rates.append(h100.kernels.forward_causal.peak_flops / a100.kernels.forward_causal.peak_flops)
    slow = MACHINES["l40s"].peak_flops / MACHINES["a6000"].peak_flops
    return (
        "With as much memory, rows are as long: an A100 of 80 GB takes "
        f"{min(rates):.1f} to {max(rates):.1f} times H100's seconds, an A6000 {slow:.1f} times "
        "L40S's, and an RTX 6000 Ada as many."
    )


def jobs(model: NamedModel) -> list[Job]:
    """An adapter's training and that of every weight; none where nothing is predicted."""
    return [] if _why(model) else PlanOptions(table=True).jobs(model.hub_name, model.config())


def line(model: NamedModel, job: Job, kind: str) -> str:
    """A line of the table of a kind of GPUs."""
    star = "\\*" * (kind.lower() in model.measured_on)
    cells = [cell(job, f"{count}x{kind}").text.replace("<", "&lt;") for count in COUNTS]
    return f"| {model.name}{star} | {'LoRA' if job.lora else 'full'} | {' | '.join(cells)} |"


def page() -> Iterator[str]:
    """The page's lines."""
    intro, legend, below, rest = parts()
    yield from (intro, "", legend, "", below, "", rest, "")
    for kind in KINDS:
        note = MACHINES[kind.lower()].note
        yield from (f"## {kind}", "", *([f"{note[0].upper()}{note[1:]}.", ""] if note else []))
        yield f"| | | {' | '.join(f'{count} x' for count in COUNTS)} |"
        yield "|---|---|" + "---|" * len(COUNTS)
        for model in NAMED.values():
            for job in jobs(model):
                yield line(model, job, kind)
        yield ""


if __name__ == "__main__":
    PAGE.write_text("\n".join(page()).strip() + "\n", encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
