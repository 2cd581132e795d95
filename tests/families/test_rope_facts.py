"""What configs say of their RoPE: how far it reaches, and which kinds of scaling are left."""

from typing import Any

import pytest

from longctx_patch.families.rope import scale_rope
from longctx_patch.families.rope_facts import reach_problem, reachable_length
from tests.hf.tiny import featured_config, tiny_config


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
