"""Fresh adapters: where they go in each family, and that they begin the same however weights are
read. What a model's code does not train stays frozen."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from longctx_patch.recipes import models
from tests.hf.tiny import SUPPORTED, featured_model
from tests.recipes.conftest import loaded, settings_of

MLP = ("gate_proj", "up_proj", "down_proj")


def saved(family: str, folder: Path) -> Path:
    featured_model(family).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("llama4_text", {"router"}),
        ("phimoe", {"router"}),
        ("nemotron_h", {"conv1d", "out_proj"}),
        ("falcon_h1", {"conv1d", "out_proj"}),
    ],
)
def test_linear_layers_that_cant_have_an_adapter_have_none(family: str, left_out: set[str]) -> None:
    """A router's result is no tensor, and peft refuses what Mamba's kernels take the weights of."""
    model = models.add_lora(featured_model(family), settings_of(), seed=0)
    wrapped = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    assert wrapped
    assert not wrapped & left_out
    assert wrapped.issuperset({"q_proj", "k_proj", "v_proj", "o_proj"})
    ids = torch.arange(3, 20)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHARED = [f"mlp.{which}{name}.weight" for which in ("", "shared_experts.") for name in MLP]


@pytest.mark.parametrize(
    ("family", "ends"), [("qwen3_5_moe_text", STACKED), ("deepseek_v3", SHARED)]
)
def test_what_an_adapter_leaves_out_is_said_and_can_be_named(family: str, ends: list[str]) -> None:
    """Experts that are no linear layers; in families whose experts PEFT finds, the other MLPs."""
    said: list[str] = []
    model = featured_model(family)
    left = [w for name, w in model.named_parameters() if name.endswith(tuple(ends))]
    models.add_lora(model, settings_of(), 0, said.append)
    (line,) = said
    assert f"leaves {sum(weight.numel() for weight in left):,} weights frozen" in line
    assert line.endswith(f"--lora-target-parameters {' '.join(ends)} adapts them too.")

    asked = settings_of(lora_target_parameters=ends)
    models.add_lora(featured_model(family), asked, 0, said.append)
    models.add_lora(featured_model("qwen3_moe"), settings_of(), 0, said.append)
    tied = featured_model("llama", tie_word_embeddings=True)
    models.add_lora(tied, settings_of(also_train=["embeddings"]), 0, said.append)
    assert len(said) == 1


def test_a_target_that_no_weight_has_is_refused() -> None:
    asked = settings_of(lora_target_parameters=["experts.gate_proj"])
    with pytest.raises(
        ValueError, match=r"gate_proj: no .*experts\.down_proj, mlp\.experts\.gate_up_proj\."
    ):
        models.add_lora(featured_model("qwen3_5_moe_text"), asked, 0)
    with pytest.raises(ValueError, match=r"in one tensor: none\."):
        models.add_lora(featured_model("llama"), asked, 0)
    asked = settings_of(lora_target_parameters=["q_proj.weight"])
    with pytest.raises(ValueError, match=r"q_proj\.weight: PEFT refuses .* Leave out what lora_"):
        models.add_lora(featured_model("llama"), asked, 0)
    with pytest.raises(ValueError, match=r"lora_dropout=0\.1 with lora_target_parameters"):
        settings_of(lora_target_parameters=STACKED, lora_dropout=0.1)


@pytest.mark.parametrize("family", ["llama", "olmo_hybrid"])
def test_an_adapter_is_the_same_however_weights_are_read(family: str, tmp_path: Path) -> None:
    """Before OLMo hybrid's weights are read whole, it is tried to read them by rows."""
    asked = settings_of(saved(family, tmp_path), dtype="float32")
    found: list[dict[str, Tensor]] = []
    for number, sharded in enumerate((False, True)):
        torch.manual_seed(number)
        model = models.add_lora(loaded(asked, sharded=sharded), asked, seed=7)
        found.append({name: p for name, p in model.named_parameters() if p.requires_grad})
    one, other = found
    assert one.keys() == other.keys() != set()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "family", [name for name in ("afmoe", "ernie4_5_moe", "laguna") if name in SUPPORTED]
)
def test_what_a_model_does_not_train_is_not_trained_after_reading(
    family: str, tmp_path: Path
) -> None:
    """Biases by which experts are balanced get no gradient, for which DDP would wait."""
    made = featured_model(family)
    frozen = {name for name, p in made.named_parameters() if not p.requires_grad}
    assert frozen
    made.save_pretrained(tmp_path)
    model = loaded(settings_of(tmp_path, dtype="float32", full=True)).train()
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen
    ids = torch.arange(3, 20)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == frozen
