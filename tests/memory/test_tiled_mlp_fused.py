"""MLPs in tiles in patched models whose MLPs are compiled or Liger Kernel's."""

from types import MethodType
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.integrations import liger

from longctx_patch.hf.layers import fused_layers
from longctx_patch.hf.layers.fused_layers import fuse_layers
from longctx_patch.hf.model.transformers_api import dense_mlps
from longctx_patch.kernels.installed import Package
from tests.hf.tiny import tiny_model
from tests.memory.trained import adapter, assert_near, tiled


def deep_model() -> Any:
    return tiny_model(num_hidden_layers=9)


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize(("parts", "patched_first"), [("all", True), ("mlps", False)])
def test_compiled_mlps(patched_first: bool, parts: str) -> None:
    """All layers share four graphs of a tile: with and without gradients, for one length and for
    any."""
    wanted = [tiled(deep_model(), 1).step(length) for length in (31, 37, 41)]
    model = deep_model()

    def compile_parts() -> None:
        if parts == "all":
            fuse_layers(model, "compile")
        for mlp in dense_mlps(model):
            mlp.compile()  # type: ignore[union-attr]

    if not patched_first:
        compile_parts()
    it = tiled(model, 4, checkpoint="attention")
    if patched_first:
        compile_parts()
    for length, step in zip((31, 37, 41), wanted, strict=True):
        assert_near(it.step(length), step, 1e-5)
    assert it.handle.mlp_tiles == (4,) * 9
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 4 if parts == "mlps" else 4 < graphs < 3 * 5
    it.step(29)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["unimplemented"], "a limit on recompiling was not met"
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])


@pytest.mark.usefixtures("aot_eager")
def test_dropout_is_not_compiled() -> None:
    """MLPs with dropout run uncompiled: compiled code might draw other numbers in backward."""
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(1)
        model = get_peft_model(tiny_model(), adapter(lora_dropout=0.4))
        it = tiled(model.train(), 4, checkpoint="attention")
        if is_compiled:
            for mlp in dense_mlps(it.handle.model):
                mlp.compile()  # type: ignore[union-attr]
        torch.manual_seed(3)
        found.append(it.step())
    assert_near(found[1], found[0])
    assert not counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("patched_first", [True, False])
def test_liger_kernel_before_or_after_patch(
    patched_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger Kernel gives MLPs a forward of their own, which stays after `unpatch`."""

    def apply(model: Any, options: dict[str, Any]) -> None:
        for mlp in filter(None, dense_mlps(model)):
            assert "forward" not in vars(mlp)
            mlp.forward = MethodType(doubled, mlp)

    def doubled(mlp: Any, hidden: Tensor) -> Tensor:
        return 2 * type(mlp).forward(mlp, hidden)

    monkeypatch.setattr(liger, "apply_liger_kernel", apply)
    monkeypatch.setattr(Package, "problem", lambda package: None)
    monkeypatch.setattr(fused_layers, "runs_triton", lambda: True)
    model = tiny_model()
    fuse_layers(model, "liger")
    wanted = tiled(model, 1).step()
    model = tiny_model()
    if not patched_first:
        fuse_layers(model, "liger")
    it = tiled(model, 4)
    if patched_first:
        fuse_layers(model, "liger")
    assert_near(it.step(), wanted)
    assert it.handle.mlp_tiles == (4, 4)
    it.handle.unpatch()
    assert all(mlp.forward.__func__ is doubled for mlp in dense_mlps(model))  # type: ignore[union-attr]
