"""Compiled parts of layers under every policy, FSDP2 and adapters, layers that a user compiles, and
what Liger Kernel changes."""

import os
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch._dynamo.utils import counters
from transformers.integrations import liger
from transformers.models.llama import modeling_llama

from longctx_patch.families.checks import UnsupportedModelError
from longctx_patch.families.supported import FAMILIES
from longctx_patch.hf.layers import fused_layers
from longctx_patch.hf.layers.fused_layers import (
    LIGER_FAMILIES,
    choose_fused_layers,
    fuse_layers,
    require_fused_layers,
)
from longctx_patch.kernels.installed import Package
from longctx_patch.memory.ladder import after_climbs
from longctx_patch.memory.policies import CheckpointPolicy
from tests.harness import run_distributed
from tests.hf.tiny import SUPPORTED, featured_model, gradients, tiny_model
from tests.memory.trained import Gradients, Trained, adapter, assert_near, averaged

LAYERS = 9
LENGTHS = (31, 37, 41, 29)


def trained(how: fused_layers.FusedLayersName) -> tuple[list[Gradients], int]:
    """(steps, each over a row of a new length under new policies; graphs compiled after the second
    step)."""
    model = tiny_model(num_hidden_layers=LAYERS)
    fuse_layers(model, how)
    it = Trained(model, checkpoint="auto")
    steps, graphs = [], [0]
    for number, length in enumerate(LENGTHS):
        it.force(after_climbs(LAYERS + 4 * number % (LAYERS + 1), LAYERS))
        steps.append(it.step(length, seed=number))
        graphs.append(counters["stats"]["unique_graphs"])
    it.handle.unpatch()
    ids = torch.arange(40)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [*steps, gradients(model)], graphs[-1] - graphs[2]


@pytest.mark.usefixtures("aot_eager")
def test_compiled_layers_are_exact_and_compiled_for_two_lengths_only() -> None:
    """Parts of layers are compiled; whole layers with checkpointing inside were never compiled."""
    wanted, no_graphs = trained("none")
    assert no_graphs == counters["stats"]["unique_graphs"] == 0
    found, late_graphs = trained("compile")
    assert late_graphs == 0
    for mine, stock in zip(found, wanted, strict=True):
        assert_near(mine, stock, 1e-5)
    # Five graphs (four parts, attention in two) at most thrice: one length, any, whole rows.
    assert 0 < counters["stats"]["unique_graphs"] < 3 * 5
    assert not counters["unimplemented"], "a limit on recompiling was not met"
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])


def adapted_and_sharded(how: fused_layers.FusedLayersName) -> Gradients:
    """A LoRA model under FSDP2, patched first, then fused; both ranks share the sequence."""
    model = tiny_model()
    torch.manual_seed(1)
    it = Trained(get_peft_model(model, adapter()), ulysses_degree=2, checkpoint="attention")
    fuse_layers(it.model, how)
    it.shard()
    found = it.step(37)
    it.handle.unpatch()
    return {name: averaged(grad) for name, grad in found.items()}


def check_adapted_and_sharded() -> None:
    wanted = adapted_and_sharded("none")
    assert not counters["stats"]["unique_graphs"]
    assert_near(adapted_and_sharded("compile"), wanted, 1e-5)
    assert counters["stats"]["unique_graphs"]
    assert not counters["unimplemented"]


def test_experts_are_not_compiled() -> None:
    model = tiny_model("mixtral", num_local_experts=4)
    fuse_layers(model, "compile")
    compiled = {name for name, m in model.named_modules() if m._compiled_call_impl is not None}
    names = ("input_layernorm", "self_attn", "post_attention_layernorm")
    assert compiled == {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in names}


def test_an_mlp_beside_experts_is_compiled() -> None:
    if "gemma4_text" not in SUPPORTED:
        pytest.skip("the installed transformers has no gemma4_text")
    model = featured_model("gemma4_text")
    fuse_layers(model, "compile")
    layer = model.model.layers[0]
    compiled = {n for n, m in layer.named_children() if m._compiled_call_impl is not None}
    assert {"mlp", "self_attn", "input_layernorm"} <= compiled
    assert not compiled & {"experts", "router"}


@pytest.fixture
def liger_is_installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Pretend that Liger Kernel is installed and changes Llama's module; return its options."""
    asked: dict[str, Any] = {}

    def apply(model: Any, options: dict[str, Any]) -> None:
        asked.update(options)
        modeling_llama.LlamaMLP = modeling_llama.LlamaRMSNorm = object
        modeling_llama.apply_rotary_pos_emb = asked["rope"] = lambda *_: "rotated"

    for name in ("LlamaMLP", "LlamaRMSNorm", "apply_rotary_pos_emb"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    monkeypatch.setattr(liger, "apply_liger_kernel", apply)
    monkeypatch.setattr(Package, "problem", lambda package: None)
    monkeypatch.setattr(fused_layers, "runs_triton", lambda: True)
    monkeypatch.setenv("LIGER_KERNEL_IMPL_ROPE", "of this test")  # restored at the end
    monkeypatch.delenv("LIGER_KERNEL_IMPL_ROPE")
    return asked


def test_liger_changes_one_model_and_the_rotary_embedding_on_gpus(
    liger_is_installed: dict[str, Any],
) -> None:
    """Liger Kernel also replaces classes of the modeling file, which `fuse_layers` restores."""
    stock = {name: getattr(modeling_llama, name) for name in ("LlamaMLP", "LlamaRMSNorm")}
    ids = torch.arange(9)[None]
    wanted = tiny_model()(input_ids=ids).logits
    for _ in range(2):  # two models of a family
        fuse_layers(tiny_model(), "liger")
        assert liger_is_installed["cross_entropy"] is False
        assert liger_is_installed["fused_linear_cross_entropy"] is False
        assert all(getattr(modeling_llama, name) is value for name, value in stock.items())
        rope: Any = modeling_llama.apply_rotary_pos_emb
        assert not isinstance(rope.stock, type(rope))
        assert rope.fused() == "rotated"
        assert torch.equal(tiny_model()(input_ids=ids).logits, wanted)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gemma4_text"])
def test_mlps_of_families_with_experts_stay(
    family: str, liger_is_installed: dict[str, Any]
) -> None:
    """Whatever their activation: that of an MLP is looked at where Liger Kernel computes it."""
    if family not in SUPPORTED:
        pytest.skip(f"the installed transformers has no {family}")
    fuse_layers(featured_model(family), "liger")
    assert liger_is_installed["swiglu"] is False
    assert liger_is_installed["geglu"] is False


@pytest.mark.usefixtures("liger_is_installed")
@pytest.mark.parametrize("chosen", [None, "LIGER_KERNEL_IMPL_ROPE", "LIGER_KERNEL_IMPL"])
def test_liger_rotates_with_triton_unless_another_kernel_is_chosen(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse_layers(tiny_model(), "compile")
    assert "LIGER_KERNEL_IMPL_ROPE" not in os.environ
    if chosen:
        monkeypatch.setenv(chosen, "nvidia-cutedsl")
    fuse_layers(tiny_model(), "liger")
    own = "nvidia-cutedsl" if chosen == "LIGER_KERNEL_IMPL_ROPE" else None
    assert os.environ.get("LIGER_KERNEL_IMPL_ROPE") == (own if chosen else "nvidia-triton")


@pytest.mark.usefixtures("liger_is_installed")
def test_auto() -> None:
    assert set(LIGER_FAMILIES) <= set(FAMILIES)
    llama, olmo = tiny_model(), tiny_model("olmo")
    assert choose_fused_layers("auto", llama, "cuda").how == "liger"
    assert choose_fused_layers("auto", llama, "cpu") == (
        "none",
        "Liger Kernel has no kernels for device cpu",
    )
    how, why = choose_fused_layers("auto", olmo, "cuda")
    assert how == "none"
    assert why.startswith("Liger Kernel has no kernels for olmo, only for llama, mistral,")
    assert choose_fused_layers("compile", olmo, "cpu").how == "compile"


def test_auto_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` leaves layers as they are without Triton, without the package, or with an old one."""
    assert choose_fused_layers("auto", tiny_model(), "cuda").why.startswith(
        "Liger Kernel needs Tri"
    )
    monkeypatch.setattr(fused_layers, "runs_triton", lambda: True)
    for version, problem in ((None, "needs the package liger-kernel"), ("0.8.0", "0.8.0 is inst")):
        monkeypatch.setattr(Package, "version", version)
        how, why = choose_fused_layers("auto", tiny_model(), "cuda")
        assert how == "none"
        assert problem in why
        assert why.endswith("pip install 'liger-kernel>=0.8.5'")
        with pytest.raises(ImportError, match=problem):
            fuse_layers(tiny_model(), "liger")


def test_liger_on_a_class_of_ones_own(liger_is_installed: dict[str, Any]) -> None:
    """Remote code whose class derives from a family's is fused like the family."""

    class LlamaForCausalLM(modeling_llama.LlamaForCausalLM):
        pass

    stock = modeling_llama.LlamaRMSNorm
    fuse_layers(LlamaForCausalLM(tiny_model().config), "liger")
    assert liger_is_installed["rope"]
    assert modeling_llama.LlamaRMSNorm is stock


@pytest.mark.usefixtures("liger_is_installed")
def test_refusals() -> None:
    with pytest.raises(UnsupportedModelError, match=r"olmo, only for llama.* how='compile'"):
        fuse_layers(tiny_model("olmo"), "liger")
    with pytest.raises(UnsupportedModelError, match=r"act_fn is .*would compute silu"):
        fuse_layers(tiny_model(hidden_act="gelu"), "liger")
    with pytest.raises(UnsupportedModelError, match=r"rms_norm_eps is 0.* how='compile'"):
        fuse_layers(tiny_model(rms_norm_eps=0.0), "liger")
    with pytest.raises(
        ValueError, match=r"'liger': .* no kernels for device cpu. Or use 'compile'"
    ):
        require_fused_layers("liger", "cpu")
    require_fused_layers("liger", "cuda")
    with pytest.raises(ValueError, match=r"'auto': choose one of liger.*choose_fused_layers"):
        fuse_layers(tiny_model(), "auto")
    with pytest.raises(ValueError, match="'triton': choose one of liger, compile, none"):
        fuse_layers(tiny_model(), "triton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        fuse_layers(torch.nn.Linear(2, 2), "none")


def step_compiled(
    policy: CheckpointPolicy, *, compiled: bool
) -> tuple[Gradients, int, int, list[int]]:
    """(the second step, messages, kernel calls, graphs after each step)."""
    it = Trained(tiny_model(), length=37, ulysses_degree=2, checkpoint=policy)
    if compiled:
        for layer in it.handle.model.get_decoder().layers:
            layer.compile(backend="aot_eager")
    graphs = []
    for _ in range(2):
        found = it.step()
        graphs.append(counters["stats"]["unique_graphs"])
    it.handle.unpatch()
    totals = it.handle.counters
    return found, totals.messages, totals.kernel_calls, graphs


def check_compiled() -> None:
    policies: tuple[CheckpointPolicy, ...] = ("none", "attention")
    for policy in policies:
        eager, *sent, _ = step_compiled(policy, compiled=False)
        found, *sent_compiled, graphs = step_compiled(policy, compiled=True)
        assert sent_compiled == sent
        assert_near(found, eager, 1e-5)
        assert graphs[1] == graphs[0] > 0, "a batch of the same length is compiled no more"
    for reason in counters["graph_break"]:
        assert "torch.compiler.disable" in reason


def check_on_two_ranks(rank: int) -> None:
    check_compiled()
    torch._dynamo.reset()
    counters.clear()
    torch.compiler.set_stance("default", force_backend="aot_eager")
    check_adapted_and_sharded()


def test_compiled_layers_on_two_ranks() -> None:
    """Layers that a user compiles are exact and compiled once; so are those that are compiled here,
    with adapters under FSDP2."""
    run_distributed(check_on_two_ranks, 2)
