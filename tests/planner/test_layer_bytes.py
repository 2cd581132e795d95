"""Bytes of layers and of steps against what a meter counts while a small stock model trains.

Kernels on the CPU keep other bytes than on the GPU only where a comment says so.
"""

import importlib
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from longctx_patch.memory.ladder import Extra
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.planner.job import Job, parse_cluster
from longctx_patch.planner.layer_bytes import BF16, FP32, LayerBytes, layer_bytes
from longctx_patch.planner.model_shape import shape_of
from tests.hf.tiny import tiny_model
from tests.memory.live_bytes import LiveBytes
from tests.memory.trained import Trained
from tests.planner.jobs import candidate, result_of

LENGTH = 96
ROWS = 2  # of `token_rows`
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}
RANK = 4
OLDER = [("mixtral", "intermediate_size"), ("olmoe", "intermediate_size")]


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


def metered(
    family: str, *, lora: bool = False, layer: int = 1, **sizes: Any
) -> tuple[Extra, LayerBytes, Any]:
    """(bytes per token that a layer kept; the prediction of them; the model's config)."""
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
    extra, num_tokens = use.extra_bytes[layer], ROWS * LENGTH
    per_token = Extra(extra.attention // num_tokens, extra.none // num_tokens)
    job = tiny_job(config, LENGTH, lora=lora)
    return per_token, layer_bytes(job, candidate(), job.shape.layers[layer]), config


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


class SavesAsFla(torch.autograd.Function):
    """Saves what fla 0.6's ChunkGatedDeltaRuleFunction saves, and returns the values."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
    ) -> Any:
        rows = torch.ones(*beta.shape, 64, dtype=value.dtype)
        ctx.save_for_backward(
            torch.ones_like(query),
            torch.ones(key.shape[:3]),
            torch.ones_like(key),
            torch.ones(key.shape[:3]),
            value.contiguous(),
            torch.ones_like(g),
            beta,
            rows,
        )
        ctx.shapes = [x.shape for x in (query, key)]
        return value.contiguous().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *_, g, beta, _ = ctx.saved_tensors
        zeros = (grad.new_zeros(shape) for shape in ctx.shapes)
        return *zeros, grad, torch.zeros_like(g), torch.zeros_like(beta)


class SavesAsCausalConv1d(torch.autograd.Function):
    """Saves what causal-conv1d's function saves, its input, and returns a copy of it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert ctx.saved_tensors
        return grad


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64},
}


def hybrid_sizes(
    family: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Sizes of a small hybrid. In place of kernels it has functions that save as much as these; all
    else is transformers'."""
    model_type = family.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
        return SavesAsFla.apply(query, key, value, g, beta), None

    def convolution(hidden: Tensor, *_: Any, **__: Any) -> Any:
        return SavesAsCausalConv1d.apply(hidden)

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", rule)
    monkeypatch.setattr(modeling, "causal_conv1d_fn", convolution)
    return {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": heads[0],
        "linear_num_value_heads": heads[1],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "head_dim": 32,
        **HYBRIDS[family],
    }


@pytest.mark.parametrize("heads", [(2, 4), (4, 4)])
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_of_two_kinds_keep_what_is_predicted(
    family: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = hybrid_sizes(family, heads, monkeypatch)
    found, predicted, config = metered(family, **sizes)
    # Norms also keep 1 + weight in float32, however many tokens there are.
    norms = 2 * FP32 * config.hidden_size / (ROWS * LENGTH)
    # Routers keep what divides their weights.
    routed = FP32 * (1 + sizes["num_experts_per_tok"]) if "num_experts" in sizes else 0
    assert found.attention == predicted.input
    assert sum(found) == pytest.approx(predicted.whole + routed + norms, abs=1)
    # Of the last layer the meter also sees the output.
    found, predicted, _ = metered(family, layer=2, **sizes)
    norms += 2 * FP32 * config.head_dim / (ROWS * LENGTH)
    whole = predicted.whole + routed + BF16 * config.hidden_size
    assert sum(found) == pytest.approx(whole + norms, abs=1)


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_an_adapter_leaves_frozen_keeps_no_input(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, and experts that PEFT's `all-linear` does not find."""
    sizes = hybrid_sizes(family, (2, 4), monkeypatch)
    found, predicted, _ = metered(family, lora=True, **sizes)
    assert sum(found) == pytest.approx(predicted.whole, rel=0.015)


def kept_by_autograd(family: str, num_layers: int, **sizes: Any) -> float:
    """Bytes for each token of tensors that autograd keeps in a stock model's layers."""
    given: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": num_layers} | sizes
    model = tiny_model(family, dtype=torch.bfloat16, **given)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that its place is its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.get_decoder()(input_ids=torch.arange(LENGTH)[None] % 60, use_cache=False)
    own = (tensor for place, tensor in kept.items() if place not in weights)
    return sum(tensor.untyped_storage().nbytes() for tensor in own) / LENGTH


@pytest.mark.parametrize(("family", "width"), [("qwen3_moe", "moe_intermediate_size"), *OLDER])
@pytest.mark.parametrize("chosen", [2, 3])
def test_experts_keep_a_token_for_each_that_it_goes_through(
    family: str, width: str, chosen: int
) -> None:
    number = "num_local_experts" if family == "mixtral" else "num_experts"
    sizes: dict[str, Any] = {number: 8, "num_experts_per_tok": chosen, width: 64}
    config = tiny_model(family, **{"hidden_size": 128, "num_hidden_layers": 2} | sizes).config
    job = tiny_job(config, LENGTH)
    predicted = layer_bytes(job, candidate(), job.shape.layers[1]).whole
    found = kept_by_autograd(family, 4, **sizes) - kept_by_autograd(family, 3, **sizes)
    # Mixtral's router keeps what divides its weights; OLMoE norms all heads at once.
    beside = {"mixtral": 4 + 4 * chosen, "olmoe": -4 * 4}
    assert found == pytest.approx(predicted + beside.get(family, 0), abs=1)


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_step_with_experts_peaks_near_where_it_is_predicted(
    family: str, policy: LayerPolicy
) -> None:
    number = "num_local_experts" if family == "mixtral" else "num_experts"
    sizes: dict[str, Any] = {number: 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    sizes |= {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
    length = 256
    with LiveBytes(10**12) as meter:
        model = tiny_model(family, dtype=torch.bfloat16, **sizes)
        it = Trained(model, meter=meter, forced=[policy] * 3)
        it.step(length)
        found = it.peak(meter, length)
    job = tiny_job(model.config, ROWS * length)
    memory = result_of(job, ulysses=1, ring=1, checkpoint=policy).memory
    predicted = memory.total - memory.weights - memory.optimizer
    assert predicted == pytest.approx(found, rel=0.12)


def test_adapters_under_autocast_share_the_inputs_of_their_layers() -> None:
    found, predicted, config = metered("llama", lora=True)
    copied = BF16 * config.hidden_size  # o_proj's input, for its adapter
    assert sum(found) == pytest.approx(predicted.whole + copied, rel=0.03)


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
    length = 128
    with LiveBytes(10**12) as meter:
        sizes = SIZES | {"intermediate_size": intermediate}
        model = tiny_model("llama", dtype=torch.bfloat16, **sizes)
        it = Trained(model, meter=meter, forced=[policy] * 3, mlp_tiles=tiles)
        it.step(length)
        found = it.peak(meter, length)
    job = tiny_job(model.config, ROWS * length)
    memory = result_of(job, ulysses=1, ring=1, checkpoint=policy, mlp_tiles=tiles).memory
    predicted = memory.total - memory.weights - memory.optimizer
    assert predicted == pytest.approx(found, rel=0.12)
