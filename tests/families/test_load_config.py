"""Configs that no model can have are refused with the file, the field and its value, before
anything is built of them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.families.config_values import problem_of
from longctx_patch.families.load_config import load_model_config
from tests.hf.tiny import FAMILIES, featured_config, tiny_config
from tests.tiny_llama import TINY_LLAMA

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 3}, "num_key_value_heads=3: it must divide num_attention_heads=4"),
    ({"hidden_size": 33}, "hidden_size=33: num_attention_heads=4 must divide it"),
    ({"num_attention_heads": 0}, "num_attention_heads=0: it counts something"),
    ({"vocab_size": 0}, "vocab_size=0: it counts something, and is a whole number"),
    ({"vocab_size": 258.0}, "vocab_size=258.0: it counts"),
    ({"num_hidden_layers": -2}, "num_hidden_layers=-2: it counts"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True: it counts"),
    ({"intermediate_size": "48"}, "intermediate_size='48': it counts"),
    ({"head_dim": 0}, "head_dim=0: it counts"),
    ({"max_position_embeddings": -1}, "max_position_embeddings=-1: it counts"),
    ({"sliding_window": -4}, "sliding_window=-4: a window is a whole number"),
    ({"rope_theta": 0}, "rope_theta=0 in rope_parameters: it is a finite number above 0"),
    ({"rope_theta": -1e4}, "rope_theta=-10000.0 in rope_parameters: it is a finite number above"),
    ({"rope_theta": "10000"}, "rope_theta='10000' in rope_parameters: .* without quotes"),
    ({"rope_theta": None}, "rope_theta=None in rope_parameters: it is a number"),
    ({"rope_parameters": YARN | {"factor": -4}}, "factor=-4 in rope_parameters: .* above 0"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05: it is a small number, 0 or more"),
    ({"hidden_act": "sillu"}, "hidden_act='sillu': .* Did you mean 'silu'"),
    ({"pad_token_id": 258}, "pad_token_id=258: the vocabulary has the tokens 0 to 257"),
    ({"dtype": "int8"}, "dtype=torch.int8: weights have a floating-point dtype"),
    ({"architectures": "LlamaForCausalLM"}, "architectures.*'LlamaForCausalLM'.* list"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
]
BAD_FILES = {
    "": "it is no JSON .Expecting value: line 1",
    "[1]": "holds a list, not an object",
    "null": "holds a NoneType, not an object",
    '{\n"model_type": "llama",': "no JSON .*line 2",
    '{"model_type": "llama", "vocab_size": 3, "vocab_size": 4}': "'vocab_size' is given twice",
    '{"model_type": "llama", "rope_theta": NaN}': "rope_theta is NaN, which is no number of JSON",
    '{"model_type": "llama", "a": [0, Infinity]}': r"a\[1\] is Infinity, which is no number",
}


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES, ids=str)
def test_values_that_no_model_can_have(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY_LLAMA, **changes}))
    for given in (str(file), str(tmp_path)):
        with pytest.raises(ValueError, match=f"{given}.*{message}"):
            load_model_config(given)


@pytest.mark.parametrize("content", BAD_FILES)
def test_files_that_hold_no_config(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{file}.*{BAD_FILES[content]}"):
        load_model_config(str(file))
    file.write_bytes(b"{\xff}")
    with pytest.raises(ValueError, match="byte 1 is no UTF-8 text"):
        load_model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "heads", "groups"),
    [
        ("qwen3_5_text", "linear_num_value_heads", "linear_num_key_heads"),
        ("bamba", "mamba_n_heads", "mamba_n_groups"),
        ("nemotron_h", "mamba_num_heads", "n_groups"),
        ("zamba2", "n_mamba_heads", "mamba_ngroups"),
    ],
)
def test_heads_with_a_state_share_key_heads_evenly(family: str, heads: str, groups: str) -> None:
    """Such a model can be made, and fails in its first forward."""
    config = featured_config(family)
    assert problem_of(config) is None
    number = getattr(config, heads)
    setattr(config, groups, number + 1)
    assert problem_of(config) == (
        f"{groups}={number + 1}: it must divide {heads}={number}, since as many heads with a state "
        "share each of them"
    )
    setattr(config, groups, 0)
    assert (problem_of(config) or "").startswith(f"{groups}=0: it counts something")


def test_rope_of_each_kind_of_layer_is_looked_at() -> None:
    """Also of a config that was made in Python, where a number may be NaN."""
    config = featured_config("gemma3_text")
    config.rope_parameters["full_attention"]["rope_theta"] = 0.0
    assert problem_of(config) == (
        "rope_theta=0.0 in rope_parameters.full_attention: it is a finite number above 0"
    )
    config = tiny_config("llama")
    config.rms_norm_eps = math.nan
    assert problem_of(config) == "rms_norm_eps=nan: it is a finite number"


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text", "ministral3", "gpt_oss", "phi3"])
def test_configs_of_families_pass(family: str) -> None:
    assert problem_of(featured_config(family)) is None
