"""Bytes of layers and of steps against what a meter counts while a small stock model trains.

Kernels on the CPU keep other bytes than on the GPU only where a comment says so.
"""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from longctx_patch.choose.search import result_of
from longctx_patch.memory.ladder import Extra
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.predict.run.candidate import Job
from longctx_patch.predict.run.cluster import parse_cluster
from longctx_patch.predict.run.components import BF16, LayerBytes, layer_bytes
from longctx_patch.predict.run.shape import shape_of
from tests.hf.tiny import tiny_model
from tests.memory.live_bytes import LiveBytes
from tests.memory.trained import Trained
from tests.predict.run.jobs import candidate

LENGTH = 96
ROWS = 2  # of `token_rows`
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}
RANK = 4


def tiny_job(config: Any, seq_len: int, *, lora: bool = False) -> Job:
    return Job(
        shape=shape_of(config, "tiny"),
        cluster=parse_cluster("H200"),
        seq_len=seq_len,
        fused_layers=False,
        fsdp=False,
        lora=lora,
        lora_rank=RANK,
    )


def metered(family: str, *, lora: bool = False, **sizes: Any) -> tuple[Extra, LayerBytes, Any]:
    """(bytes per token that a middle layer kept; the prediction of them; the model's config)."""
    with LiveBytes(10**12) as meter:  # around the model: views of weights are none of a layer's
        model: Any = tiny_model(family, dtype=torch.bfloat16, **SIZES | sizes)
        config = model.config
        if lora:
            adapter = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, adapter)
        it = Trained(model, meter=meter)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=lora):
                it.step(LENGTH)
        use = it.handle.checkpointing.memory
        assert use is not None
    extra, num_tokens = use.extra_bytes[1], ROWS * LENGTH
    per_token = Extra(extra.attention // num_tokens, extra.none // num_tokens)
    return per_token, layer_bytes(tiny_job(config, LENGTH, lora=lora), candidate()), config


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 16}),  # heads * head_dim != hidden_size
        ("llama", {"head_dim": 64, "num_key_value_heads": 4}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"num_key_value_heads": 1}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 64}),
        ("smollm3", {"pad_token_id": 0}),
    ],
)
def test_a_layer_keeps_what_is_predicted(family: str, sizes: dict[str, Any]) -> None:
    found, predicted, config = metered(family, **sizes)
    assert found.attention == predicted.input + predicted.results
    # The meter also sees the layer's output, which stock layers don't keep.
    assert sum(found) == predicted.whole + BF16 * config.hidden_size


def test_an_adapter_under_autocast_keeps_its_inputs_again() -> None:
    found, predicted, config = metered("llama", lora=True)
    hidden = BF16 * config.hidden_size
    # Also, o_proj's input is copied for its adapter; two frozen norms keep no normed input.
    expected = predicted.whole + 2 * hidden - 2 * hidden
    assert sum(found) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("policy", "intermediate", "tiles"),
    [
        *(("none", 2048, 1), ("attention", 2048, 1), ("full", 352, 1)),
        *(("none", 352, 4), ("attention", 2048, 4), ("attention", 352, 4), ("full", 2048, 8)),
    ],
)
def test_a_step_peaks_near_where_it_is_predicted(
    policy: LayerPolicy, intermediate: int, tiles: int
) -> None:
    length = 256
    with LiveBytes(10**12) as meter:
        sizes = SIZES | {"intermediate_size": intermediate}
        model = tiny_model("llama", dtype=torch.bfloat16, **sizes)
        it = Trained(model, meter=meter, forced=[policy] * 3, mlp_tiles=tiles)
        it.loss(length).backward()
        model.zero_grad()
        rest = meter.allocated()
        meter.reset_peak()
        it.loss(length).backward()
    job = tiny_job(model.config, ROWS * length)
    memory = result_of(job, ulysses=1, ring=1, checkpoint=policy, mlp_tiles=tiles).memory
    found, predicted = meter.peak() - rest, memory.total - memory.weights - memory.optimizer
    assert predicted == pytest.approx(found, rel=0.12)
