"""Scaled configs give the frequencies of transformers' own RoPE functions, on every rank; what
would go wrong is refused."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import AutoConfig, LlamaConfig, Qwen3Config
from transformers import __version__ as version
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longctx_patch import LongContextConfig
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.rope import chosen_theta, scale_rope
from longctx_patch.families.rope_facts import (
    SCALINGS,
    WITHOUT_POSITIONS,
    RopeKind,
    describe_change,
    full_attention_rope,
    possible_kinds,
    reach_problem,
    reachable_length,
)
from longctx_patch.verification.shrink import keep_float64
from tests.hf.float64 import assert_exact
from tests.hf.tiny import (
    SUPPORTED,
    featured_config,
    featured_model,
    tiny_config,
    token_rows,
)


def llama(**changes: Any) -> LlamaConfig:
    values = {"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 5e5}}
    return LlamaConfig(hidden_size=64, num_attention_heads=4, **{**values, **changes})


def frequencies(config: LlamaConfig) -> torch.Tensor:
    return LlamaRotaryEmbedding(config).inv_freq


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


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}

LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
QWEN_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
"""With the older name of its type, which vLLM refuses where it contradicts the newer one."""
NO_WINDOW = {"sliding_window": None}
FACTORS = [1.0 + n / 2 for n in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": FACTORS,
    "original_max_position_embeddings": 32,
}


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "qwen": QWEN_YARN,
    "factor": QWEN_YARN | {"attention_factor": 1.0},
    "unknown": DYNAMIC | {"alpha": 1000.0},
    "long": LONGROPE,
}
REFUSED: list[tuple[str, Any, int, dict[str, Any], str]] = [
    ("default", "none", 129, {}, "reaches 128.*Scale its RoPE: --rope theta or"),
    ("default", "yarn", 128, {}, "already reaches 128.*Use rope kind 'none'"),
    ("default", "yarn", 512, {"factor": 2}, "256, less.*Use 4 or more"),
    ("default", "linear", 512, {"factor": 0.5}, "1 or more"),
    ("default", "none", 64, {"factor": 2}, "factor 2 with.*yarn or llama3"),
    ("default", "theta", 512, {"factor": 2}, "factor 2 with rope kind 'theta'"),
    ("default", "yarn", 512, {"theta": 1e6}, "it belongs to theta"),
    ("default", "theta", 512, {"theta": 4e5}, "model has 500000.*Leave it out"),
    ("default", "theta", 512, {"theta": math.nan}, "larger base"),
    ("default", "longrope", 512, {}, "0 factors.*8 frequencies.*long_factor"),
    ("default", "longrope", 512, {"factors": [1.0] * 7}, "7 factors.*list of 8"),
    ("default", "longrope", 512, {"factors": [0.0] * 8}, "above 0"),
    ("default", "ntk", 512, {}, "choose one of none, theta"),
    ("default", "yarn", 0, {}, "1 or more"),
    ("linear", "yarn", 512, {}, "before its scaling"),
    ("dynamic", "none", 64, {}, "ranks would"),
    ("qwen", "none", 999, {}, "x4 from 128"),
    ("qwen", "yarn", 500, {"factor": 5}, "already reaches 512"),
    ("factor", "yarn", 999, {}, "attention_factor=1.0.*its own factor 4.0.*taking it out"),
    ("unknown", "dynamic", 512, {}, "have alpha, which is not known here"),
    ("long", "longrope", 512, {}, "0 factors"),
]


@pytest.mark.parametrize(("rope", "kind", "length", "options", "message"), REFUSED)
def test_refusals_name_value_rule_and_fix(
    rope: str, kind: RopeKind, length: int, options: dict[str, Any], message: str
) -> None:
    config = llama(**{"rope_parameters": ROPES[rope]} if ROPES[rope] else {})
    with pytest.raises(ValueError, match=message):
        scale_rope(config, kind=kind, target_length=length, **options)


@pytest.mark.parametrize(
    ("family", "changes", "kind", "message"),
    [
        ("phi3", NO_WINDOW, "yarn", r"yarn.*phi3.*no scaling .* longrope.*--rope theta or long"),
        ("phimoe", NO_WINDOW, "longrope", "wrong factors"),
        ("deepseek_v3", {}, "llama3", "latent attention.*Use --rope theta or yarn or dynamic"),
        ("gpt_oss", {}, "theta", "YaRN's numbers.*Use --rope yarn"),
        ("ministral3", NO_WINDOW, "theta", "Use --rope yarn"),
        ("gemma4_text", {}, "yarn", "no factor in vLLM. Use --rope theta"),
        ("beam", {}, "yarn", "none of them in full attention"),
        ("cohere2", {}, "theta", "full attention sees no positions.*Leave --rope out"),
        ("granite_swa", {}, "theta", "layer_rope_theta"),
        ("granitemoehybrid", {"position_embedding_type": "nope"}, "theta", "any length"),
        ("mistral", {"sliding_window": 16}, "theta", "any length"),
        ("kimi_linear", {}, "yarn", "only models with rotary"),
    ],
)
def test_kinds_that_readers_would_compute_otherwise_are_refused(
    family: str, changes: dict[str, Any], kind: RopeKind, message: str
) -> None:
    if family in SUPPORTED:
        with pytest.raises(ValueError, match=message):
            scale_rope(featured_config(family, **changes), kind=kind, target_length=10**6)


def test_theta_is_chosen_by_its_rule() -> None:
    """ProLong took 8e6 for 64K from 5e5 at 8K; where twice the NTK-aware base is below the least
    base of the length, that is taken: SmolLM2 found no keys at the far end of 64K with 1.6e6."""
    llama_3 = LlamaConfig(
        head_dim=128, max_position_embeddings=8192, rope_parameters={"rope_theta": 5e5}
    )
    assert chosen_theta(llama_3, 65536) == (
        pytest.approx(8.3e6),
        "twice the NTK-aware base, as ProLong took (arXiv 2410.02660)",
    )
    smollm = LlamaConfig(
        head_dim=64, max_position_embeddings=8192, rope_parameters={"rope_theta": 1e5}
    )
    assert chosen_theta(smollm, 65536)[0] == pytest.approx(3e6)
    assert chosen_theta(smollm, 131072) == (
        pytest.approx(9.1e6),
        "the least base of 131072 tokens (arXiv 2405.14591)",
    )
    scaled = scale_rope(smollm, kind="theta", target_length=65536)
    assert scaled.rope_parameters == {"rope_type": "default", "rope_theta": 3e6}
    assert scaled.max_position_embeddings == 65536
    given = scale_rope(smollm, kind="theta", target_length=65536, theta=1.6e6)
    assert given.rope_parameters["rope_theta"] == 1.6e6


FROM_8 = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 8}
FROM_128 = QWEN_YARN | {"beta_fast": 64.0, "factor": 1024 / 128}
REPLACED: list[tuple[dict[str, Any], RopeKind, dict[str, Any], str]] = [
    (LLAMA_31, "yarn", FROM_8, "factor 64 from 8 tokens; replaces llama3 x8 from 8"),
    (LLAMA_31, "llama3", LLAMA_31 | {"factor": 64.0}, "factor 64 from 8 tokens; replaces llama3"),
    (
        QWEN_YARN | {"beta_fast": 64.0, "attention_factor": 0.1 * math.log(4) + 1},
        "yarn",
        {name: value for name, value in FROM_128.items() if name != "type"},
        "factor 8 from 128 tokens; replaces yarn x4 from 128",
    ),
    (LINEAR, "linear", LINEAR | {"factor": 2.0 * 4}, "factor 8; replaces linear x2"),
    (LINEAR, "theta", LINEAR | {"rope_theta": 4.9e6}, "rope_theta 500000 to 4.9e+06; factor 2"),
    (
        LONGROPE,
        "theta",
        {"rope_type": "default", "rope_theta": 1.1e6},
        "rope_theta 10000 to 1.1e+06; replaces longrope x8 from 32",
    ),
]


@pytest.mark.parametrize(("rope", "kind", "wanted", "said"), REPLACED)
def test_scaling_that_is_there_is_replaced_and_said(
    rope: dict[str, Any], kind: RopeKind, wanted: dict[str, Any], said: str
) -> None:
    """From the length before it, which Llama 3.1 and published YaRN configs state."""
    states = 128 if rope["rope_type"] in ("yarn", "linear") else 256
    before = llama(rope_parameters=rope, max_position_embeddings=states)
    target = 1024 if rope["rope_type"] in ("yarn", "longrope") else 512
    after = scale_rope(before, kind=kind, target_length=target)
    assert after.rope_parameters == {"rope_theta": rope["rope_theta"], **wanted}
    assert after.max_position_embeddings == target
    assert describe_change(before, after).startswith(said)


LONG_PHI = {
    "rope_parameters": LONGROPE,
    "max_position_embeddings": 90,
    "original_max_position_embeddings": 32,
    "sliding_window": 128,
}
"""As Phi-3-mini-128k's, whose window is longer than its reach."""
REACH = 32
PER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}


@pytest.mark.parametrize(
    ("family", "changes", "kind", "options", "ranks"),
    [
        ("llama", {}, "theta", {}, 2),
        ("llama", {}, "yarn", {}, 3),
        ("llama", {}, "llama3", {}, 4),
        ("llama", {}, "longrope", {"factors": FACTORS}, 2),
        ("llama", {}, "linear", {}, 2),
        ("llama", {}, "dynamic", {}, 2),
        ("llama", {"rope_parameters": LLAMA_31}, "yarn", {}, 2),
        ("phi3", LONG_PHI, "longrope", {}, 2),
        ("phi3", NO_WINDOW, "theta", {}, 2),
        ("glm", {}, "yarn", {}, 2),
        ("deepseek_v3", {}, "yarn", {}, 2),
        ("gpt_oss", {}, "yarn", {}, 2),
        ("olmo3", {"rope_parameters": PER_TYPE}, "yarn", {}, 3),
        ("olmo3", {"rope_parameters": PER_TYPE}, "longrope", {"factors": FACTORS}, 2),
        ("gemma3_text", {}, "linear", {}, 2),
        ("gemma4_text", {}, "theta", {}, 2),
    ],
)
def test_ranks_rotate_every_position_as_stock_transformers_does(
    family: str,
    changes: dict[str, Any],
    kind: RopeKind,
    options: dict[str, Any],
    ranks: int,
    tmp_path: Path,
) -> None:
    """A row beyond the original reach: loss and gradients in float64 are those of one process, for
    the config that plain transformers reads from the file."""
    length = 83
    before = featured_config(family, **{"max_position_embeddings": REACH} | changes)
    if (family, kind) == ("olmo3", "longrope") and Version(version) < Version("5.21"):
        with pytest.raises(ValueError, match=r"before 5\.21 raises .*Use --rope theta or yarn"):
            scale_rope(before, kind=kind, target_length=length, **options)
        return
    written = scale_rope(before, kind=kind, target_length=max(length, REACH), **options)
    written.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.rope_parameters == written.rope_parameters
    assert "type" not in full_attention_rope(config)[1]
    torch.manual_seed(0)
    read = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")
    taken = {name: getattr(config, name) for name in read if hasattr(config, name)}
    model = featured_model(family, **changes | taken)
    keep_float64(model)
    ids = torch.tensor([row["input_ids"] for row in token_rows(length, num_rows=1)])
    spread = LongContextConfig(ring_degree=ranks, checkpoint="attention")
    assert_exact(model, spread, {"input_ids": ids, "labels": ids})
    if "sliding_attention" in (before.rope_parameters or {}):
        kept = before.rope_parameters["sliding_attention"]
        assert config.rope_parameters["sliding_attention"] == kept


def test_a_frozen_longrope_is_right_on_ranks_and_an_open_one_refused() -> None:
    two = LongContextConfig(ring_degree=2)
    open_one = featured_config("phi3", **LONG_PHI)
    with pytest.raises(ValueError, match=r"--rope longrope, which is longctx_patch.scale_rope"):
        check_model_config(open_one, two)
    frozen = scale_rope(open_one, kind="longrope", target_length=80)
    check_model_config(frozen, two)
    assert frozen.rope_parameters["short_factor"] == FACTORS
    assert frozen.max_position_embeddings == 90
    assert describe_change(open_one, frozen) == "its long factors at every length"
    again = scale_rope(frozen, kind="longrope", target_length=80)
    assert again.to_dict() == frozen.to_dict()


def test_every_possible_kind_of_every_family_is_read_back() -> None:
    """`longctx patch` once wrote run folders of Phi-3 with YaRN, whose training could not begin."""
    num_scaled = 0
    for family in SUPPORTED:
        config = featured_config(family)
        if not getattr(config, "rope_parameters", None) or reachable_length(config) is None:
            continue
        if family == "beam":
            continue
        kinds, why = possible_kinds(config)
        assert why or kinds == SCALINGS
        for kind in set(kinds) - {"longrope"}:
            before = config.to_dict()
            scaled = scale_rope(config, kind=kind, target_length=2**20)
            assert config.to_dict() == before, "the argument stays as it was"
            read = type(scaled).from_dict(scaled.to_dict())
            assert read.rope_parameters == scaled.rope_parameters, family
            assert read.max_position_embeddings == 2**20, family
            num_scaled += 1
    assert num_scaled > 300


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


def roped(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 5e5, **values}}


YARN_4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA_4 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BLIND = {"position_embedding_type": "nope"}


@pytest.mark.parametrize(
    ("family", "values", "reach"),
    [
        ("llama", {}, 2048),
        ("llama", roped(**YARN_4), 2048),
        ("llama", roped(**YARN_4) | {"max_position_embeddings": 40}, 128),
        ("llama", roped(**LLAMA_4, original_max_position_embeddings=256), 2048),
        ("llama", roped(**LLAMA_4, original_max_position_embeddings=2048), 8192),
        ("llama", roped(rope_type="linear", factor=4.0), 2048),
        ("llama", roped(rope_type="dynamic", factor=4.0), 8192),
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
