"""Jobs of Llama-3.1-8B's shape, from a config and without weights."""

from functools import lru_cache
from typing import Any

import tests.benchmarks  # puts the scripts' folder on the path  # noqa: F401  # isort: skip
from model_shapes import MODELS, model_config

from longctx_patch.config import LongContextConfig
from longctx_patch.planner import search
from longctx_patch.planner.job import Candidate, Job, parse_cluster
from longctx_patch.planner.model_shape import ModelShape, shape_of
from longctx_patch.planner.search import Result
from longctx_patch.plans.generators.setting import Setting

LLAMA_8B = {name: value for name, value in MODELS["llama-8b"].items() if name != "model_type"}


@lru_cache
def llama_shape(num_layers: int = 32) -> ModelShape:
    return shape_of(model_config("llama-8b", num_layers, num_tokens=2), "llama")


@lru_cache
def hybrid_shape(num_layers: int = 8) -> ModelShape:
    """Qwen3.5-9B's widths: of four layers, three are gated delta nets."""
    return shape_of(model_config("qwen3.5-9b", num_layers, num_tokens=2), "hybrid")


def hybrid_job(gpus: str, seq_len: int, *, num_layers: int = 8, **job: Any) -> Job:
    return Job(shape=hybrid_shape(num_layers), cluster=parse_cluster(gpus), seq_len=seq_len, **job)


def candidate(num_layers: int = 32, *, ulysses: int = 1, mlp_tiles: int = 1) -> Candidate:
    return Candidate(
        setting=Setting(plan="zigzag", layout="zigzag", ulysses_degree=ulysses, ring_degree=1),
        checkpoint="none",
        policies=tuple("none" for _ in range(num_layers)),
        mlp_tiles=mlp_tiles,
    )


def llama_job(
    gpus: str, seq_len: int, *, num_layers: int = 32, host_gib: float | None = None, **job: Any
) -> Job:
    return Job(
        shape=llama_shape(num_layers),
        cluster=parse_cluster(gpus, host_gib),
        seq_len=seq_len,
        **job,
    )


def result_of(
    job: Job,
    *,
    ulysses: int,
    ring: int,
    mlp_tiles: int = 1,
    offload_states: bool = False,
    **options: Any,
) -> Result:
    """What a config of these degrees and options takes, by default with whole MLPs."""
    config = LongContextConfig(
        ulysses_degree=ulysses, ring_degree=ring, mlp_tiles=mlp_tiles, **options
    )
    return search.result_of(job, config, offload_states=offload_states)
