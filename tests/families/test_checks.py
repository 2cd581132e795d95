"""The table of support: the tiny models have what it says, and what is not covered is refused.
Sizes of recurrent layers from a config are those of the weights that it makes."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from longctx_patch import LongContextConfig, UnsupportedModelError
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.facts import ModelFacts, is_latent
from longctx_patch.families.family import RECURRENT
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.families.supported import REFUSED as REFUSED_TYPES
from longctx_patch.families.supported import TABLE
from longctx_patch.families.text_part import auto_class
from longctx_patch.hf.model import transformers_api
from tests.hf.features import WINDOW
from tests.hf.tiny import (
    SUPPORTED,
    featured_config,
    featured_model,
    router_weight,
    tiny_config,
)

LENGTH = 43


@pytest.mark.parametrize("family", SUPPORTED)
def test_the_tiny_models_have_what_the_table_says(family: str) -> None:
    config, features = featured_config(family), SUPPORTED[family].features
    check_model_config(config, LongContextConfig(ring_degree=4))
    facts = ModelFacts.of(config)
    assert (WINDOW in facts.windows) == ("sliding window" in features)
    assert bool(facts.softcap) == ("softcap" in features)
    assert bool(facts.experts) == bool({"experts", "router loss"} & {*features})
    assert is_latent(config) == ("latent attention" in features)
    assert (WINDOW in [layer.chunk for layer in facts.layers]) == ("chunked attention" in features)
    model = featured_model(family)
    assert hasattr(model, router_weight(family)) == ("router loss" in features)
    assert type(model) is auto_class(config)._model_mapping[type(config)]
    sinks = [p for name, p in model.named_parameters() if name.endswith("sinks")]
    assert bool(sinks) == ("sinks" in features)
    assert all(bool((sink != 0).all()) for sink in sinks)


def test_each_model_type_has_one_row_and_is_known_to_transformers() -> None:
    types = [*(family.model_type for family in TABLE), *REFUSED_TYPES]
    assert len(set(types)) == len(types)
    unknown = set(types) - set(CONFIG_MAPPING_NAMES)
    assert not unknown or Version(transformers.__version__) < Version("5.24")
    assert all(family.name for family in TABLE)


REFUSED = [
    ("longcat_flash", {}, "'longcat_flash' is not supported: its layers have two attentions"),
    ("albert", {}, "'albert' is not supported: not compared with one process, so not proven"),
    ("phimoe", {}, r"router_jitter_noise=0\.01: .*noise=0\.0"),
    ("llama4", {}, "train its text model"),
    ("jamba", {}, r"is affine in its state.* start anew on each \(layer 0 is linear_attention\)"),
    (
        "qwen3_5_text",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "chunked_attention"]},
        "layer 1 is chunked_attention: .* or are linear_attention",
    ),
    (
        "qwen3",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer 1 is chunked_attention: layers here attend fully or through a sliding window",
    ),
    (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer 1 is sliding_attention, but sliding_window=None",
    ),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    (
        "llama",
        {"is_causal": False},
        r"attends to later tokens.* mask=longctx_patch.masks.bidirectional",
    ),
    ("llama", {"attention_sinks": 4}, r"attention_sinks=4: transformers has no sinks"),
    ("mixtral", {"router_jitter_noise": 0.01}, r"router_jitter_noise=0\.01: .*noise=0\.0"),
    ("seed_oss", {}, r"attention_dropout=0\.1, residual_dropout=0\.1: .*residual_dropout=0\.0"),
    ("phi3", {"resid_pdrop": 0.1}, r"resid_pdrop=0\.1"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "has no softcap for this family"),
]


@pytest.mark.parametrize(("family", "overrides", "message"), REFUSED)
def test_what_is_not_covered_is_refused(
    family: str, overrides: dict[str, object], message: str
) -> None:
    config = tiny_config(family, **overrides)
    with pytest.raises(UnsupportedModelError, match=message):
        check_model_config(config, LongContextConfig(ring_degree=2))


RECURRENT_FAMILIES = [
    name for name, family in SUPPORTED.items() if set(family.features) & set(RECURRENT)
]


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_sizes_are_those_of_the_weights(family: str) -> None:
    with torch.device("meta"):
        model = featured_model(family)
    modules = transformers_api.recurrent_modules(model)
    layers = recurrent_layers(model.config)
    assert layers is not None
    assert layers.num_layers == len(modules)
    decays = {n: w for n, w in modules[0].named_parameters() if n.endswith(("A_log", "dt_bias"))}
    if layers.recurrence is None:
        assert not decays
        return
    by_head = [weight for name, weight in decays.items() if name.endswith("A_log")]
    assert [weight.numel() for weight in by_head] == [layers.recurrence.num_heads]
    numbers = layers.recurrence.num_heads * layers.recurrence.value_dim
    (out,) = [
        part
        for name, part in modules[0].named_modules()
        if name in ("out_proj", "o_proj") and isinstance(part, torch.nn.Linear)
    ]
    assert out.in_features == numbers


def test_models_without_them_have_none() -> None:
    assert recurrent_layers(featured_model("llama").config) is None
