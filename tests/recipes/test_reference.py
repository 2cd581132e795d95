"""A reference holds its weights in the dtype in which its layers compute, if nothing is lost."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from longctx_patch.recipes.trl_run import reference_dtype
from longctx_patch.recipes.trl_settings import TrlSettings

SETTINGS = TrlSettings(model="m", seq_len=64, data=["d"], full=True, dtype="float32")
MIXED = {"bf16": True, "fp16": False, "sync_ref_model": False}


@pytest.mark.parametrize(
    ("changed", "args", "sharded", "found"),
    [
        ({}, {}, True, "bfloat16"),
        ({}, {"bf16": False}, True, "float32"),  # computed in float32
        ({}, {"bf16": False, "fp16": True}, True, "float32"),  # in another low precision
        ({}, {}, False, "float32"),  # autocast keeps some of it
        ({}, {"sync_ref_model": True}, True, "float32"),
        ({"model": "random/config.json"}, {}, True, "float32"),
        ({"dtype": "float16"}, {}, True, "float16"),  # as the trained weights were rounded
    ],
)
def test_dtypes(changed: dict, args: dict, sharded: bool, found: str) -> None:
    config = LlamaConfig(dtype="bfloat16")
    run = replace(SETTINGS, **changed)
    assert reference_dtype(run, config, SimpleNamespace(**MIXED | args), sharded=sharded) == found


def test_a_checkpoint_in_float32_stays_so() -> None:
    config = LlamaConfig(dtype="float32")
    assert reference_dtype(SETTINGS, config, SimpleNamespace(**MIXED), sharded=True) == "float32"
