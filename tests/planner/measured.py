"""Training steps measured on GPUs of one host, beside what is predicted.

`python -m tests.planner.measured` prints the table of docs/results/planner.md, and that of the
runs which its rates follow.
"""

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tests.benchmarks  # puts the scripts' folder on the path  # noqa: F401  # isort: skip
from config_text import NAMES, options_of
from model_shapes import model_config

from longctx_patch import LongContextConfig
from longctx_patch.planner.job import Job, parse_cluster
from longctx_patch.planner.machines import GIB
from longctx_patch.planner.model_shape import shape_of
from longctx_patch.planner.search import Result, result_of, result_with
from tests.planner.cudnn import with_kernel

ROOT = Path(__file__).parents[2]
JOB_FIELDS = {"fused": "fused_layers", "lora": "lora", "dtype": "dtype"}
"""Options of a run that are fields of a `Job`."""


class Measured(NamedTuple):
    """A step with AdamW and bfloat16: a line of docs/results/planner_runs.toml.

    `run` is a shape of benchmarks/model_shapes.py and options: `tokens` of a row, `layers`, those
    of `JOB_FIELDS`, and fields of LongContextConfig.
    """

    gpus: int
    run: str
    peak_gib: float
    seconds: float
    host_gib: float | None = None
    """GiB in the machine's host memory, if something is kept there."""
    gpu: str = "H200"
    kernel: str = "flash_attn_4"
    """Attention's, as `longctx_patch.kernels` calls it."""
    fsdp: bool = True
    states_on_host: bool = False
    is_recipe: bool = False
    """Whether this is the second step of the recipe, which clips gradients."""
    policies: str = ""
    """The policies that `auto` gave the layers, if the planner would choose others: `2 none`."""

    def predicted(self) -> Result:
        model, _, text = self.run.partition(":")
        options = options_of(text)
        tokens, layers = options.pop("tokens"), options.pop("layers", None)
        asked: dict[str, Any] = {"dtype": "bfloat16"}
        asked |= {JOB_FIELDS[name]: options.pop(name) for name in JOB_FIELDS if name in options}
        config = LongContextConfig(**{NAMES.get(name, name): x for name, x in options.items()})
        cluster = parse_cluster(f"{self.gpus}x{self.gpu}")
        hardware = with_kernel(cluster.hardware, self.kernel)
        job = Job(
            shape=shape_of(model_config(model, layers, tokens), model),
            cluster=replace(cluster, hardware=hardware),
            seq_len=tokens,
            fsdp=self.fsdp,
            clips=self.is_recipe,
            **asked,
        )
        found = result_of(job, config, offload_states=self.states_on_host)
        words = self.policies.split()
        pairs: Any = zip(words[::2], words[1::2], strict=True)
        policies = tuple(policy for number, policy in pairs for _ in range(int(number)))
        return result_with(job, replace(found.candidate, policies=policies)) if policies else found

    def line(self) -> str:
        """The line of the page's table: what was measured, and how far the prediction is off."""
        result = self.predicted()
        notes = ["cuDNN"] * (self.kernel == "cudnn") + ["without FSDP"] * (not self.fsdp)
        notes += ["states on the host"] * self.states_on_host + ["recipe"] * self.is_recipe
        notes += [self.policies] * bool(self.policies)
        gpus = f"{self.gpus}" if self.gpu == "H200" else f"{self.gpus} {self.gpu}"
        line = f"| {gpus} | {', '.join([f'`{self.run}`', *notes])} |"
        line += f" {self.peak_gib:.1f} ({result.memory.total / GIB / self.peak_gib - 1:+.1%}) |"
        line += f" {self.seconds:.3f} ({result.time.total / self.seconds - 1:+.1%}) |"
        if self.host_gib is None:
            return line + " |"
        return line + f" {self.host_gib:.1f} ({result.host_bytes / GIB / self.host_gib - 1:+.1%}) |"


def _runs(known: str) -> tuple[Measured, ...]:
    rows = tomllib.loads((ROOT / "docs/results/planner_runs.toml").read_text())[known]
    return tuple(Measured(**row) for row in rows)


AFTERWARDS = _runs("afterwards")
"""Measured after the planner was made."""
IN_VIEW = _runs("in_view")
"""Measured before the planner had its present form; its constants and terms follow these."""


class Accuracy(NamedTuple):
    """The largest errors of predictions, in percent: 4.3 for 4.3 %."""

    num_runs: int
    peak: float
    seconds: float
    host: float


@cache
def accuracy(rows: tuple[Measured, ...] = AFTERWARDS) -> Accuracy:
    """The accuracy of the planner on runs that were measured after it was made."""
    pairs = [(row, row.predicted()) for row in rows]
    peaks = [found.memory.total / GIB / row.peak_gib for row, found in pairs]
    seconds = [found.time.total / row.seconds for row, found in pairs]
    hosts = [found.host_bytes / GIB / row.host_gib for row, found in pairs if row.host_gib]
    worst = (max(abs(ratio - 1) for ratio in ratios) for ratios in (peaks, seconds, hosts))
    return Accuracy(len(rows), *(round(100 * share, 1) for share in worst))


if __name__ == "__main__":
    for rows in (AFTERWARDS, IN_VIEW):
        print("\n".join(row.line() for row in rows), end="\n\n")
    print(accuracy())
