"""A family of each combination of features, such as windows, softcap, sinks and experts, over
processes against its own stock eager attention in one process; and the table of support.

In float64 every family is compared, over virtual ranks: in `tests/hf/test_exact_families.py`, and
those with recurrent layers or latent attention in `tests/hf/test_states_and_latents.py`."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from longctx_patch import LongContextConfig, UnsupportedModelError, patch
from longctx_patch.families.checks import TABLE, check_model_config
from longctx_patch.families.facts import ModelFacts, is_latent
from longctx_patch.families.family import RECURRENT
from longctx_patch.families.refused import REFUSED as REFUSED_TYPES
from longctx_patch.families.text_part import auto_class
from tests.harness import run_distributed
from tests.hf.features import WINDOW
from tests.hf.steps import TOLERANCE, Rows, Step, collated, complaints, sharded_step
from tests.hf.tiny import (
    ONE_OF_EACH,
    SUPPORTED,
    featured_config,
    featured_model,
    gradients,
    router_weight,
    tiny_config,
)
from tests.hf.tiny import token_rows as whole_rows
from tests.reference import relative_error

CONFIGS = [featured_config(family) for family in SUPPORTED]
CLASSES = {config.model_type: auto_class(config)._model_mapping[type(config)] for config in CONFIGS}
"""Loaded at collection, so that the process from which ranks are forked loads them once."""

LENGTH = 43
"""A prime; on four ranks a window of 7 reaches from each chunk into the one before."""


def token_rows() -> Rows:
    """Two rows, of which the second is shorter, so that some ranks hold padding."""
    first, second = whole_rows(LENGTH)
    return [first, {"input_ids": second["input_ids"][: LENGTH - 14]}]


def one_process(family: str) -> Step:
    """Loss and gradients of the stock model, which sees a padding mask."""
    model = featured_model(family)
    rows = [row["input_ids"] for row in token_rows()]
    ids = torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (LENGTH - len(row)) for row in rows])
    labels = ids.masked_fill(mask == 0, -100)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return Step(loss.detach(), gradients(model))


ATTENTIVE = [
    name
    for name in ONE_OF_EACH
    if not {*SUPPORTED[name].features} & {*RECURRENT} and name != "gemma4_text"
]
"""A family of each combination of features without a recurrence, of which float32 keeps few digits,
as it does of the large scores of Gemma 4: those are compared in float64 (tests/hf)."""


def train_families(rank: int) -> dict[str, Step]:
    """A step of each, with Ulysses, ring and both in turn."""
    pairs, steps = ((1, 4), (2, 2), (4, 1)), {}
    for number, family in enumerate(ATTENTIVE):
        ulysses, ring = pairs[number % 3]
        model = featured_model(family)
        config = LongContextConfig(ulysses_degree=ulysses, ring_degree=ring)
        steps[family] = sharded_step(model, collated(patch(model, config), token_rows()))
    return steps if rank == 0 else {}


def test_each_combination_of_features_equals_stock_eager() -> None:
    steps, *_ = run_distributed(train_families, 4)
    found = [
        said for name, step in steps.items() for said in complaints(step, one_process(name), name)
    ]
    assert not found, "\n".join(found)


WINDOWED = [
    family.model_type for family in SUPPORTED.values() if "sliding window" in family.features
]


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
    assert type(model) is CLASSES[family]
    sinks = [p for name, p in model.named_parameters() if name.endswith("sinks")]
    assert bool(sinks) == ("sinks" in features)
    assert all(bool((sink != 0).all()) for sink in sinks)


@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_of_the_tiny_models_matters(family: str) -> None:
    wider = featured_model(family, sliding_window=64)
    ids = torch.tensor([whole_rows(LENGTH)[0]["input_ids"]])
    with torch.no_grad():
        narrow_logits, wide_logits = (m(ids).logits for m in (featured_model(family), wider))
    assert relative_error(narrow_logits[:, :WINDOW], wide_logits[:, :WINDOW]) < TOLERANCE
    assert relative_error(narrow_logits[:, WINDOW:], wide_logits[:, WINDOW:]) > 100 * TOLERANCE


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
