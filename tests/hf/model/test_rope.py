"""Scaled configs give the frequencies of transformers' own RoPE functions; others are refused."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longctx_patch.hf.model.rope import (
    LONGROPE_ALONE,
    WITHOUT_POSITIONS,
    RopeKind,
    reach_problem,
    reachable_length,
    scale_rope,
)
from tests.hf.tiny import SUPPORTED, featured_config, featured_model, tiny_config


def llama(**changes: Any) -> LlamaConfig:
    values = {"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 5e5}}
    return LlamaConfig(hidden_size=64, num_attention_heads=4, **{**values, **changes})


def frequencies(config: LlamaConfig) -> torch.Tensor:
    return LlamaRotaryEmbedding(config).inv_freq


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_reaches_the_length_and_keeps_the_argument_and_survives_a_file(
    kind: RopeKind, tmp_path: Any
) -> None:
    config = llama()
    before = copy.deepcopy(config.to_dict())
    scaled = scale_rope(config, kind=kind, target_length=1000)
    assert config.to_dict() == before
    assert scaled.max_position_embeddings == 1000
    scaled.save_pretrained(tmp_path)
    loaded = LlamaConfig.from_pretrained(tmp_path)
    assert loaded.rope_parameters == scaled.rope_parameters
    assert torch.equal(frequencies(loaded), frequencies(scaled))
    assert not torch.equal(frequencies(scaled), frequencies(config))
    if kind == "linear":
        torch.testing.assert_close(frequencies(scaled), frequencies(config) * 128 / 1000)


def test_yarn_keeps_fast_waves_stretches_slow_ones_and_scales_attention() -> None:
    scaled = scale_rope(llama(), kind="yarn", target_length=1024)
    assert scaled.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
    }
    stretch = frequencies(llama()) / frequencies(scaled)
    torch.testing.assert_close(stretch[[0, -1]], torch.tensor([1.0, 8.0]))
    assert LlamaRotaryEmbedding(scaled).attention_scaling > 1


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("length", [129, 1024, 1021])
def test_frozen_dynamic_has_transformers_dynamic_frequencies_at_that_length(
    factor: float, length: int
) -> None:
    scaled = scale_rope(llama(), kind="dynamic", target_length=length, factor=factor)
    assert scaled.rope_parameters["rope_type"] == "default"
    dynamic = llama(
        rope_parameters={"rope_type": "dynamic", "factor": factor, "rope_theta": 5e5}, head_dim=16
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](dynamic, torch.device("cpu"), seq_len=length)
    assert torch.equal(frequencies(scaled), theirs)
    frozen = scale_rope(dynamic, kind="dynamic", target_length=length)
    assert frozen.rope_parameters == scaled.rope_parameters
    shorter = scale_rope(dynamic, kind="dynamic", target_length=64)  # RoPE is default up to 64
    assert shorter.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    # A forward of transformers, which takes the length from the positions, gives the same.
    embedding, positions = LlamaRotaryEmbedding(dynamic), torch.arange(length)[None]
    theirs_cos, _ = embedding(torch.zeros(1), positions)
    ours_cos, _ = LlamaRotaryEmbedding(scaled)(torch.zeros(1), positions)
    torch.testing.assert_close(ours_cos, theirs_cos, atol=1e-3, rtol=0)  # float32 angles up to 1021
    torch.testing.assert_close(frequencies(scaled), embedding.inv_freq, rtol=1e-6, atol=0)


def test_dynamic_uses_a_head_dim_of_its_own() -> None:
    config = Qwen3Config(
        hidden_size=64, num_attention_heads=4, head_dim=32, max_position_embeddings=128
    )
    scaled = scale_rope(config, kind="dynamic", target_length=512)
    theta = config.rope_parameters["rope_theta"] * 4 ** (32 / 30)
    assert scaled.rope_parameters["rope_theta"] == pytest.approx(theta)


def test_a_larger_factor_reaches_further() -> None:
    scaled = scale_rope(llama(), kind="yarn", target_length=512, factor=8)
    assert scaled.rope_parameters["factor"] == 8.0
    assert scaled.max_position_embeddings == 1024


def test_a_config_that_reaches_it_passes_unchanged() -> None:
    assert scale_rope(llama(), kind="none", target_length=128).to_dict() == llama().to_dict()
    yarn = scale_rope(llama(), kind="yarn", target_length=1024)
    published = copy.deepcopy(yarn)  # it states the original length, as Qwen2.5's configs do
    published.max_position_embeddings = 128
    assert reachable_length(published) == 1024
    for kind in ("none", "yarn"):
        again = scale_rope(yarn, kind=kind, target_length=1000)
        assert again.to_dict() == yarn.to_dict()


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 5e5, **values}}


YARN_4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA_4 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BLIND = {"position_embedding_type": "nope"}


@pytest.mark.parametrize(
    ("family", "values", "reach"),
    [
        ("llama", {}, 2048),
        ("llama", rope(**YARN_4), 2048),
        ("llama", rope(**YARN_4) | {"max_position_embeddings": 40}, 128),
        ("llama", rope(**LLAMA_4, original_max_position_embeddings=256), 2048),
        ("llama", rope(**LLAMA_4, original_max_position_embeddings=2048), 8192),
        ("llama", rope(rope_type="linear", factor=4.0), 2048),
        ("llama", rope(rope_type="dynamic", factor=4.0), 8192),
        ("mistral", {"sliding_window": 16}, None),
        ("gemma3_text", {}, 2048),
        ("llama4_text", {}, 2048),
        ("granitemoehybrid", BLIND, None),
        ("granitemoehybrid", BLIND | {"position_embedding_type": "rope"}, 2048),
        ("nemotron_h", {}, None),
    ],
)
def test_reach_of_each_kind_of_rope(family: str, values: dict[str, Any], reach: int | None) -> None:
    """Windows bound the distances that rotations depend on; layers without positions have none."""
    config = (
        featured_config(family, **values) if family != "llama" else tiny_config(family, **values)
    )
    assert reachable_length(config) == reach
    if reach is None:
        assert scale_rope(config, kind="none", target_length=10**6) is not None
    else:
        assert reach_problem(config, reach) is None
        assert "allow_beyond_reach" in str(reach_problem(config, reach + 1))


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}
BY_POSITION = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""As Ministral 3's."""


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({}, {"kind": "none", "target_length": 129}, "reaches 128.*Scale its RoPE: --rope yarn"),
        ({}, {"kind": "yarn", "target_length": 128}, "already reaches 128.*Use rope kind 'none'"),
        ({}, {"kind": "yarn", "target_length": 512, "factor": 2}, "256, less.*Use 4 or more"),
        ({}, {"kind": "linear", "target_length": 512, "factor": 0.5}, "1 or more"),
        ({}, {"kind": "none", "target_length": 64, "factor": 2}, "belongs to a kind"),
        ({}, {"kind": "ntk", "target_length": 512}, "choose one of none, linear"),
        ({}, {"kind": "yarn", "target_length": 0}, "1 or more"),
        ({"rope_parameters": LINEAR}, {"kind": "yarn", "target_length": 512}, "already scaled"),
        (
            {"rope_parameters": BY_POSITION},
            {"kind": "yarn", "target_length": 512},
            r"factor 8 and original_max_position_embeddings 64 \(mscale, llama_4_scaling_beta as",
        ),
        ({"rope_parameters": DYNAMIC}, {"kind": "none", "target_length": 64}, "ranks would"),
        ({"rope_parameters": DYNAMIC}, {"kind": "yarn", "target_length": 512}, "already scaled"),
    ],
)
def test_refusals_name_value_rule_and_fix(
    config: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scale_rope(llama(**config), **arguments)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_scaled_config_of_every_family_is_read_back(kind: RopeKind) -> None:
    """`longctx patch` once wrote run folders of Phi-3 with YaRN, whose training could not begin."""
    configs = {family: featured_config(family) for family in SUPPORTED}
    ropes = {f: getattr(config, "rope_parameters", None) or {} for f, config in configs.items()}
    scalable = {f for f, rope in ropes.items() if rope.get("rope_type") == "default"}
    assert len(scalable) > 60
    assert scalable >= LONGROPE_ALONE
    for family in scalable - (LONGROPE_ALONE if kind != "dynamic" else frozenset()):
        scaled = scale_rope(configs[family], kind=kind, target_length=4096)
        read = type(scaled).from_dict(scaled.to_dict())
        assert read.rope_parameters == scaled.rope_parameters, family
        assert read.max_position_embeddings == 4096, family


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize("family", sorted(LONGROPE_ALONE))
def test_scaling_that_a_family_cannot_have_is_refused(family: str, kind: RopeKind) -> None:
    with pytest.raises(ValueError, match=rf"{kind}.*{family}.*longrope.*--rope dynamic"):
        scale_rope(featured_config(family), kind=kind, target_length=4096)


@pytest.mark.parametrize("kind", ["none", "yarn"])
def test_models_without_rope_are_refused(kind: Any) -> None:
    from transformers import GPT2Config

    with pytest.raises(ValueError, match=r"'gpt2'.*rotary"):
        scale_rope(GPT2Config(), kind=kind, target_length=4096)


@pytest.mark.parametrize("family", sorted(WITHOUT_POSITIONS & set(SUPPORTED)))
def test_models_without_positions_reach_any_length(family: str) -> None:
    """Their attention gives the same numbers wherever tokens stand."""
    config = featured_model(family).config
    assert scale_rope(config, kind="none", target_length=64).to_dict() == config.to_dict()
    scaled = scale_rope(config, kind="none", target_length=8192)
    assert reachable_length(scaled) is None
    scaled.max_position_embeddings = config.max_position_embeddings
    assert scaled.to_dict() == config.to_dict()
    with pytest.raises(ValueError, match="only models with rotary"):
        scale_rope(config, kind="yarn", target_length=8192)
    model = featured_model(family).eval()
    ids = torch.arange(3, 40)[None]
    places = torch.arange(37)[None]
    with torch.no_grad():
        here, there = (model(ids, position_ids=places + n).logits for n in (0, 9000))
    assert torch.equal(here, there)
