"""Training steps measured on NVIDIA H200s of one host, beside what is predicted.

`python -m tests.predict.run.measured` prints the tables of docs/results/planner.md.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tests.benchmarks  # puts the scripts' folder on the path  # noqa: F401  # isort: skip
from config_text import NAMES, options_of
from model_shapes import model_config

from longctx_patch import LongContextConfig
from longctx_patch.choose.search import Result, result_of, usual_tiles
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.predict.machines import GIB
from longctx_patch.predict.run.candidate import Job
from longctx_patch.predict.run.cluster import parse_cluster
from longctx_patch.predict.run.shape import shape_of

JOB_FIELDS = {"rank": "lora_rank", "fused": "fused_layers", "lora": "lora", "dtype": "dtype"}
"""Options of a run that are fields of a `Job`."""


class Measured(NamedTuple):
    """A step with AdamW, flash-attn 4 and bfloat16.

    `run` is a shape of benchmarks/model_shapes.py and options: `tokens` of a row, `layers`, those
    of `JOB_FIELDS`, and fields of LongContextConfig.
    """

    gpus: int
    run: str
    peak_gib: float
    seconds: float
    host_gib: float | None = None
    """GiB in the machine's host memory, if something is kept there."""
    fsdp: bool = True
    states_on_host: bool = False
    is_recipe: bool = False
    """Whether this is the second step of the recipe, which clips gradients."""
    policies: tuple[LayerPolicy, ...] | None = None
    """The policies that `auto` gave the layers, if the planner would choose others."""

    def predicted(self) -> Result:
        model, _, text = self.run.partition(":")
        options = options_of(text)
        tokens, layers = options.pop("tokens"), options.pop("layers", None)
        asked: dict[str, Any] = {"dtype": "bfloat16"}
        asked |= {JOB_FIELDS[name]: options.pop(name) for name in JOB_FIELDS if name in options}
        config = LongContextConfig(**{NAMES.get(name, name): x for name, x in options.items()})
        job = Job(
            shape=shape_of(model_config(model, layers, tokens), model),
            cluster=parse_cluster(f"{self.gpus}xH200"),
            seq_len=tokens,
            fsdp=self.fsdp,
            clips=self.is_recipe,
            **asked,
        )
        return result_of(
            job,
            ulysses=config.ulysses_degree,
            ring=config.ring_degree,
            checkpoint=config.checkpoint,
            attention_kept=config.attention_kept,
            offload_states=self.states_on_host,
            mlp_tiles=config.mlp_tiles or usual_tiles(job, config.sequence_degree),
            policies=self.policies,
        )

    def line(self) -> str:
        """The row's line in the tables of docs/results/planner.md."""
        result = self.predicted()
        peak, seconds = result.memory.total / GIB, result.time.total
        notes = " without FSDP" * (not self.fsdp) + " states on the host" * self.states_on_host
        notes += " (recipe)" * self.is_recipe
        for policy, how in (("offload", "offloaded"), ("none", "not recomputed")):
            if self.policies and (count := self.policies.count(policy)) > 1:
                notes += f", {count} of {len(self.policies)} layers {how}"
        host = "| | |"
        if self.host_gib is not None:
            found = result.host_bytes / GIB
            host = f"| {self.host_gib:.1f} | {found / self.host_gib - 1:+.1%} |"
        return (
            f"| {self.gpus} | `{self.run}`{notes} "
            f"| {peak:.1f} | {self.peak_gib:.1f} | {peak / self.peak_gib - 1:+.1%} "
            f"| {seconds:.3f} | {self.seconds:.3f} | {seconds / self.seconds - 1:+.1%} {host}"
        )


def _llama(tokens: int, checkpoint: str, *, ulysses: int, fused: bool = True) -> str:
    text = f"llama-8b:layers=8,tokens={tokens},ulysses={ulysses},checkpoint={checkpoint}"
    return text + ("" if fused else ",fused=false")


_RECIPE = "llama-8b-32k:layers=4,tokens=131072,ulysses=2,checkpoint=attention,dtype=float32"
IN_VIEW = (
    Measured(1, _llama(32768, "none", ulysses=1), 56.7, 1.154, fsdp=False),
    Measured(1, _llama(32768, "none", ulysses=1, fused=False), 72.1, 1.266, fsdp=False),
    Measured(1, _llama(32768, "attention", ulysses=1), 26.7, 1.287, fsdp=False),
    Measured(4, _llama(32768, "none", ulysses=4), 23.1, 0.340),
    Measured(4, _llama(131072, "none", ulysses=4), 51.0, 2.429),
    Measured(2, _llama(32768, "none", ulysses=2), 40.2, 0.634),
    Measured(2, _llama(65536, "none", ulysses=2), 58.7, 1.631),
    Measured(2, _llama(131072, "none", ulysses=2), 95.9, 4.847),
    Measured(2, _llama(32768, "attention", ulysses=2), 24.5, 0.711),
    Measured(2, _llama(65536, "attention", ulysses=2), 28.5, 1.777),
    Measured(2, _llama(32768, "offload", ulysses=2), 24.5, 0.712),
    Measured(2, _llama(65536, "offload", ulysses=2), 27.3, 1.781),
    Measured(2, "qwen2-7b:layers=8,tokens=65536,ulysses=2,checkpoint=none", 64.1, 1.592),
    Measured(2, "qwen2-7b:tokens=32768,ulysses=2,checkpoint=attention", 61.1, 2.233),
    Measured(2, _llama(131072, "offload", ulysses=2) + ",lora=true", 17.2, 4.962, 16.2),
    Measured(2, _llama(131072, "attention", ulysses=2) + ",lora=true", 23.4, 4.952),
    Measured(2, _llama(131072, "attention", ulysses=2) + ",mlp_tiles=4", 34.1, 5.255),
    Measured(2, "qwen3-8b:layers=8,tokens=65536,ulysses=2,checkpoint=attention", 28.8, 1.761),
    Measured(2, "llama-8b:layers=4,tokens=262144,ulysses=2,checkpoint=attention", 38.2, 8.740),
    Measured(2, "llama-8b:layers=4,tokens=262144,ulysses=2,checkpoint=offload", 34.4, 8.729, 16.2),
    Measured(1, _llama(32768, "attention", ulysses=1) + ",dtype=float32", 47.76, 1.338, fsdp=False),
    Measured(1, "llama-8b:tokens=16384,checkpoint=attention,lora=true", 27.8, 2.042, fsdp=False),
    Measured(1, _llama(65536, "offload", ulysses=1) + ",lora=true", 24.4, 3.361, 8.1, fsdp=False),
    Measured(
        1, _llama(65536, "attention", ulysses=1) + ",attention_kept=0.5", 33.3, 3.412, fsdp=False
    ),
    Measured(1, _llama(65536, "attention", ulysses=1), 34.6, 3.285, fsdp=False),
    Measured(1, "mistral-7b:layers=8,tokens=32768,checkpoint=none", 49.3, 1.063, fsdp=False),
    Measured(
        1, "llama-1b:tokens=65536,checkpoint=offload,attention_kept=0", 15.4, 3.351, 4.0, fsdp=False
    ),
    Measured(1, _llama(65536, "offload", ulysses=1), 14.4, 4.341, states_on_host=True),
    Measured(2, _RECIPE, 15.41, 2.957, is_recipe=True, states_on_host=True),
    Measured(
        4,
        "llama-8b:layers=2,tokens=2097152,ulysses=4,checkpoint=offload,lora=true",
        66.2,
        119.1,
        65.0,
    ),
    Measured(
        4,
        "llama-8b:tokens=1048576,ulysses=4,checkpoint=auto",
        67.2,
        441.995,
        463.0,
        policies=("attention", *("offload",) * 29, "attention", "none"),
    ),
)
"""Measured before the planner had its present form; its constants and terms follow these."""

AFTERWARDS = (
    Measured(
        2, "llama-8b:layers=4,tokens=1048576,ulysses=2,checkpoint=offload", 79.5, 118.554, 65.0
    ),
    Measured(2, "mistral-7b:layers=8,tokens=65536,ring=2,checkpoint=attention", 22.5, 1.612),
    Measured(2, "llama-8b:tokens=32768,ulysses=2,checkpoint=attention,lora=true", 20.4, 2.368),
    Measured(2, "qwen3-8b:layers=8,tokens=131072,ulysses=2,checkpoint=offload", 32.2, 4.947, 16.2),
    Measured(2, "llama-1b:tokens=65536,ulysses=2,checkpoint=none", 50.1, 1.413),
    Measured(
        2,
        "qwen2-7b:layers=8,tokens=65536,ulysses=2,checkpoint=attention,attention_kept=0.5,lora=true",
        13.9,
        1.666,
    ),
    Measured(2, _llama(131072, "attention", ulysses=2) + ",attention_kept=0.5", 36.4, 5.260),
    Measured(2, _RECIPE, 21.97, 2.394, is_recipe=True),
    Measured(
        2, "llama-8b:layers=4,tokens=1048576,ulysses=2,checkpoint=offload", 79.8, 111.727, 65.0
    ),
    Measured(
        1,
        "llama-8b:layers=2,tokens=1536000,checkpoint=offload",
        116.3,
        249.121,
        70.0,
        states_on_host=True,
    ),
    Measured(1, _llama(131072, "attention", ulysses=1), 67.5, 10.155),
    Measured(1, _llama(131072, "offload", ulysses=1), 58.9, 10.175, 16.1),
    Measured(4, _llama(131072, "none", ulysses=4), 50.9, 2.460),
    Measured(4, _llama(131072, "attention", ulysses=4), 20.2, 2.608),
    Measured(4, _llama(131072, "attention", ulysses=4) + ",mlp_tiles=2", 19.6, 2.667),
    Measured(4, _llama(262144, "none", ulysses=4), 87.9, 8.068),
    Measured(4, _llama(262144, "attention", ulysses=4), 29.2, 8.350),
    Measured(4, _llama(262144, "attention", ulysses=4) + ",mlp_tiles=2", 27.3, 8.469),
    Measured(4, _llama(131072, "offload", ulysses=4), 17.5, 2.614),
    Measured(4, _llama(131072, "offload", ulysses=4) + ",mlp_tiles=4", 15.9, 2.636),
    Measured(4, _llama(131072, "attention", ulysses=4) + ",mlp_tiles=4", 18.9, 2.627),
    Measured(4, _llama(262144, "offload", ulysses=4), 23.1, 8.382),
    Measured(4, _llama(262144, "offload", ulysses=4) + ",mlp_tiles=4", 19.6, 8.509),
    Measured(1, _llama(131072, "auto", ulysses=1), 98.6, 9.837),
    Measured(
        1,
        "llama-8b:layers=12,tokens=131072,checkpoint=auto",
        120.9,
        14.48,
        policies=(*("attention",) * 3, *("none",) * 9),
    ),
)
"""Measured since. Two things have changed in their predictions: in the two rows with
`attention_kept`, kept attention is counted beside what is recomputed; and MLPs in tiles no longer
recompute their last product, which they did when the rows with 2 tiles and those of 262,144 tokens
were measured."""


class Accuracy(NamedTuple):
    """The largest errors of predictions, in percent: 4.3 for 4.3 %."""

    num_runs: int
    peak: float
    seconds: float
    host: float


def accuracy(rows: Sequence[Measured] = AFTERWARDS) -> Accuracy:
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
