"""DPO's reference model, however it comes to be, and the policy that the layers run under."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from longctx_patch.hf.model.transformers_api import decoder_layers
from tests.hf.tiny import featured_model
from tests.plugin.launched import run_launched
from tests.trainer.trained import numbers
from tests.trl.cases import Case, make_trainer, rows

Log = list[dict[str, float]]


def trained(
    folder: Path, checkpoint: str = "none", options: Any = None, **given: Any
) -> tuple[Log, bool]:
    """What four steps log, and whether what runs the layers is still the same function."""
    config = {"ring_degree": 2, "checkpoint": checkpoint}
    case = Case("dpo", "dpo", "pairs", config, arguments={"max_steps": 4} | (options or {}))
    given["train_dataset"] = Dataset.from_list(rows("pairs", 8, 1))
    trainer = make_trainer(case, folder, is_patched=True, **given)
    before = runners(trainer.long_context_handle.model)
    trainer.train()
    is_kept = before == runners(trainer.long_context_handle.model)
    trainer.unpatch()
    return [numbers(entry) for entry in trainer.state.log_history], is_kept


def runners(model: Any) -> list[Any]:
    """What runs each layer, and whether it is switched on."""
    names = ("_gradient_checkpointing_func", "gradient_checkpointing")
    return [[getattr(layer, name, None) for name in names] for layer in decoder_layers(model)]


def check_references(folder: Path) -> None:
    """By its name TRL loads the model and its reference, which begin with the same weights."""
    loading = {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"}}
    by_name, _ = trained(folder, model=str(folder / "model"), options=loading)
    reference = featured_model("llama").eval()
    given, _ = trained(folder, model=featured_model("llama"), ref_model=reference)
    assert by_name == given
    assert abs(by_name[2]["rewards/margins"]) > 1e-5  # the reference stays behind


def check_policies(folder: Path) -> None:
    """TRL switches checkpointing off while the reference runs, and on again as transformers'."""
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"])
    found = {}
    for checkpoint in ("none", "attention"):
        torch.manual_seed(0)
        model = featured_model("llama")
        found[checkpoint] = trained(folder, checkpoint, model=model, peft_config=adapter)
    assert found["attention"][0] == found["none"][0]
    assert found["attention"][1]


def check_all(folder: str) -> None:
    check_references(Path(folder))
    check_policies(Path(folder))


def test_references_and_policies_are_those_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    featured_model("llama").save_pretrained(tmp_path / "model")
    run_launched(check_all, 2, str(tmp_path))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:DPOConfig has max_length")
def test_weights_of_a_reference_that_is_let_go_are_freed(tmp_path: Path) -> None:
    """TRL lets go of one once its numbers are computed ahead."""
    case = Case("dpo", "dpo", "pairs", {}, arguments={"precompute_ref_log_probs": True})
    reference = featured_model("llama").eval()
    given = {"train_dataset": Dataset.from_list(rows("pairs", 2, 1)), "ref_model": reference}
    trainer = make_trainer(case, tmp_path, is_patched=True, model=featured_model("llama"), **given)
    weights = weakref.ref(reference.lm_head.weight)
    trainer.accelerator._models.remove(reference)  # under FSDP2 it isn't there
    given.clear()
    del reference
    trainer.ref_model = None
    gc.collect()
    assert weights() is None
    trainer.unpatch()
