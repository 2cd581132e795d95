"""Policy products beside Liger Kernel: every gradient has the bits of a step that keeps all."""

import copy
from typing import Any

import pytest
import torch

from longctx_patch.hf.layers.fused_layers import fuse_layers
from longctx_patch.memory import run_layer
from tests.hf.tiny import featured_model
from tests.memory.trained import Trained, assert_equal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe"])
def test_gradients_have_the_bits_of_those_of_none(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel")
    free, freed = run_layer.free_inputs_of_products, list[int]()

    def noted(*layer: Any, **options: Any) -> int:
        freed.append(free(*layer, **options))
        return freed[-1]

    monkeypatch.setattr(run_layer, "free_inputs_of_products", noted)
    model = featured_model(family).to("cuda", dtype)
    fuse_layers(model, "liger")
    none = Trained(copy.deepcopy(model), checkpoint="none", length=301).step()
    assert not freed
    assert_equal(Trained(model, checkpoint="products", length=301).step(), none)
    assert len(freed) == len(model.get_decoder().layers)
    assert all(num_bytes > 0 for num_bytes in freed)
