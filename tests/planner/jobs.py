"""Jobs of Llama-3.1-8B's shape, from a config and without weights."""

from functools import lru_cache
from typing import Any

from transformers import LlamaConfig

from longctx_patch.planner import Candidate, Job, ModelShape, parse_cluster, shape_of

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@lru_cache
def llama_shape(num_layers: int = 32) -> ModelShape:
    return shape_of(LlamaConfig(**LLAMA_8B | {"num_hidden_layers": num_layers}), "llama")


def candidate(num_layers: int = 32, *, ulysses: int = 1, mlp_tiles: int = 1) -> Candidate:
    return Candidate(
        ulysses=ulysses,
        ring=1,
        plan="auto",
        checkpoint="none",
        policies=("none",) * num_layers,
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
