"""config.json has RoPE under its newer and older names, and transformers reads back both."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from longctx_patch.recipes.exporting import write_config
from tests.hf.tiny import tiny_config

PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
OLDER = {"rope_theta", "rope_scaling", "partial_rotary_factor"}


def older_names(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "config.json").read_text())
    return {name: content[name] for name in OLDER & content.keys()}


@pytest.mark.parametrize(
    ("family", "rope", "older"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}),
        ("phi3", PARTIAL, {"rope_theta": 500.0, "partial_rotary_factor": 0.75}),
        ("llama", YARN | {"rope_theta": 500.0}, {"rope_theta": 500.0, "rope_scaling": YARN}),
    ],
    ids=["default", "partial", "yarn"],
)
def test_older_names_say_what_the_newer_ones_say(
    family: str, rope: dict[str, Any], older: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_config(family, rope_parameters=rope, pad_token_id=None)
    write_config(config, tmp_path)
    assert older_names(tmp_path) == older
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.rope_parameters == config.rope_parameters
    write_config(loaded, tmp_path)  # a model that is loaded and written again
    assert older_names(tmp_path) == older


def test_rope_per_kind_of_layer_has_no_older_name(tmp_path: Path) -> None:
    config = tiny_config("gemma3_text")
    assert "full_attention" in config.rope_parameters
    write_config(config, tmp_path)
    assert older_names(tmp_path) == {}
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
