"""Fused layers in bfloat16: their error against float64 is at most twice that of stock layers."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.models.llama import modeling_llama

from longctx_patch import LongContextConfig, LongContextTrainer
from longctx_patch.families.text_part import auto_class
from longctx_patch.hf.layers.fused_layers import (
    LIGER_FAMILIES,
    FusedLayersName,
    choose_fused_layers,
    fuse_layers,
)
from longctx_patch.hf.model.sequence_kernels import run_torch_recurrences
from longctx_patch.verification.shrink import keep_float64
from tests.hf.tiny import SUPPORTED, featured_config, tiny_model, token_rows
from tests.memory.trained import Trained
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

DEVICE, ROPE = "cuda", "apply_rotary_pos_emb"
LENGTH, STEPS = 301, 4


@pytest.fixture(autouse=True)
def rotary_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the stock functions after each test: Liger's would stay in the modeling file."""
    homes = [module for name, module in sys.modules.items() if ".modeling_" in name]
    for home in (module for module in homes if hasattr(module, ROPE)):
        monkeypatch.setattr(home, ROPE, getattr(home, ROPE))


def outcome(family: str, dtype: torch.dtype, how: FusedLayersName) -> tuple[Tensor, Tensor]:
    """(loss, all gradients in one tensor); weights are rounded to bfloat16 for every dtype.

    Recurrences are transformers' torch functions, since their kernels know no float64.
    """
    model = numbered(family, torch.bfloat16)
    if dtype == torch.float64:
        model = numbered(family, dtype)
        model.load_state_dict(numbered(family, torch.bfloat16).state_dict())
    fuse_layers(model, how)
    checkpoint = "none" if how == "none" else "attention"
    options: dict[str, Any] = {"checkpoint": checkpoint, "torch_recurrence": True}
    run_torch_recurrences(model)
    found = Trained(model, length=LENGTH, **options).step()
    return found.pop("loss"), torch.cat([grad.flatten() for grad in found.values()])


def numbered(family: str, dtype: torch.dtype) -> Any:
    """A model on the GPU whose norms aren't 1, with every expert in use, so that rounding doesn't
    choose among them."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    config = featured_config(family)
    experts = [getattr(config, name) for name in names if getattr(config, name, None)]
    used = dict.fromkeys(("num_experts_per_tok", "top_k_experts"), experts[0]) if experts else {}
    config = featured_config(family, **used)
    torch.manual_seed(0)
    model: Any = auto_class(config).from_config(config, dtype=dtype)
    if dtype == torch.float64:
        keep_float64(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.train().to(DEVICE)


@pytest.mark.parametrize("checkpoint", ["none", "attention", "offload"])
def test_steps_leave_nothing_behind(checkpoint: Any) -> None:
    """Memory never grows and stays constant in the end, with a head dim for which Liger Kernel
    prefers another kernel."""
    pytest.importorskip("liger_kernel")
    length = 2**16
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": length,
    }
    model: Any = tiny_model(**sizes, dtype=torch.bfloat16)
    assert model.config.head_dim == 128
    fuse_layers(model.to(DEVICE).train(), "liger")
    it = Trained(model, length=length, rows=1, checkpoint=checkpoint)
    allocated = []
    for _ in range(9):
        it.loss().backward()
        model.zero_grad()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1:] == sorted(allocated[1:], reverse=True)
    assert len(set(allocated[-5:])) == 1


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)


@pytest.mark.parametrize("part", ["mlp", "input_layernorm", "rope"])
def test_rows_of_more_numbers_than_32_bits_count(part: str) -> None:
    """Each part of a layer is right at tokens before and after 2**31 numbers, both ways."""
    pytest.importorskip("liger_kernel")
    width, inner, head_dim = 4096, 16384, 128
    model: Any = tiny_model(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=width // head_dim,
        dtype=torch.bfloat16,
    ).to(DEVICE)
    assert model.config.head_dim == head_dim
    fuse_layers(model, "liger")
    tokens = 2**31 // (inner if part == "mlp" else width) + 5
    few = torch.tensor([0, 1, tokens // 2, tokens - 6, tokens - 5, tokens - 1], device=DEVICE)

    def run(x: Tensor, positions: Tensor) -> Tensor:
        if part != "rope":
            return getattr(model.model.layers[0], part)(x)
        heads = x.unflatten(2, (-1, head_dim)).transpose(1, 2)
        angles = model.model.rotary_emb(x, positions[None])
        # Rotation works in place, on the output of a linear layer; k equals q here.
        rotated, _ = modeling_llama.apply_rotary_pos_emb(heads.clone(), heads.clone(), *angles)
        return rotated.transpose(1, 2).flatten(2)

    x, dout = (numbers(1, tokens, width, seed=seed) for seed in (0, 1))
    out, dx = with_gradient(run, x, dout, torch.arange(tokens, device=DEVICE))
    right = with_gradient(run, x[:, few], dout[:, few], few)
    for found, wanted in zip((out, dx), right, strict=True):
        assert relative_error(found[:, few], wanted) < 1e-2
        assert found[:, few].abs().amax(2).min() > 0


def with_gradient(run: Any, x: Tensor, dout: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = run(x, positions)
    # Liger's norm and rotary embedding overwrite dout with their gradient.
    return out.detach(), torch.autograd.grad(out, x, dout.clone())[0]


@pytest.mark.parametrize("family", [name for name in LIGER_FAMILIES if name in SUPPORTED])
def test_liger_is_as_accurate_as_stock_layers(family: str) -> None:
    pytest.importorskip("liger_kernel")
    model = numbered(family, torch.bfloat16)
    assert choose_fused_layers("auto", model, DEVICE).how == "liger"
    assert_as_accurate(family, "liger")


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5_text"])
def test_compiled_layers_are_as_accurate_as_stock_ones(family: str) -> None:
    assert_as_accurate(family, "compile")


def assert_as_accurate(family: str, how: FusedLayersName) -> None:
    loss, grads = outcome(family, torch.float64, "none")
    stock_loss, stock_grads = outcome(family, torch.bfloat16, "none")
    fused_loss, fused_grads = outcome(family, torch.bfloat16, how)
    assert not torch.equal(fused_grads, stock_grads), "the layers are not fused"
    assert relative_error(fused_grads, grads) <= 2 * relative_error(stock_grads, grads)
    # One number may be right by luck, so the bound is never below 1e-3.
    assert relative_error(fused_loss, loss) <= max(2 * relative_error(stock_loss, loss), 1e-3)


def logged(folder: Path, *, liger: bool) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: LongContextTrainer with Liger, or the stock Trainer."""
    torch.manual_seed(0)
    model: Any = tiny_model(head_dim=64)
    rows = [{**row, "labels": row["input_ids"]} for row in token_rows(1021, 2 * STEPS)]
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        learning_rate=1e-3,
        use_liger_kernel=liger,
        liger_kernel_config={"fused_linear_cross_entropy": False} if liger else None,
    )
    more: dict[str, Any] = {"long_context": LongContextConfig()} if liger else {}
    trainer = (LongContextTrainer if liger else Trainer)(
        model=model, args=args, train_dataset=rows, **more
    )
    trainer.train()
    kernels = [m for m in model.modules() if "liger" in getattr(m.forward, "__module__", "")]
    assert bool(kernels) == liger
    history = trainer.state.log_history
    return [(line["loss"], line["grad_norm"]) for line in history if "grad_norm" in line]


def test_steps_under_a_trainer_are_those_of_the_stock_layers(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    stock = logged(tmp_path / "stock", liger=False)
    ours = logged(tmp_path / "ours", liger=True)  # puts its classes into transformers' module
    assert len(ours) == STEPS
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=2e-4, atol=0)
