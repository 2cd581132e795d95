"""Nothing is trained on numbers that are none, and nothing of them is saved: the recipe, in this
process and on two, with what was seen to go on silently before."""

import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, get_scheduler, set_seed
from trl import DPOConfig, SFTConfig

from longctx_patch.health.finite import BadStepError
from longctx_patch.hf.sentinel import DriftError
from longctx_patch.recipes import finetune
from longctx_patch.recipes.metrics import strict_line
from longctx_patch.rules.number_rules import check_numbers
from tests.health.planted import planted
from tests.plugin.launched import run_launched
from tests.recipes.conftest import flags_of, numbers, settings_of
from tests.tiny_llama import TINY_LLAMA

GRADIENT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def job(tmp_path: Path, config_file: Path, text_file: Path) -> list[str]:
    """Arguments of a run of seven steps without an output."""
    flags = flags_of(model=config_file, text=text_file, seq_len=64, max_steps=7)
    return [*flags, "--full", *flags_of(learning_rate=1e-2, weight_decay=0.1)]


def strict(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as a parser reads them that keeps to JSON."""

    def refuse(token: str) -> Any:
        raise AssertionError(f"{token} is no JSON")

    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def without_step(job: list[str], left_out: int) -> list[float]:
    """Losses of a plain loop of torch and transformers over the same rows, without one step."""
    settings = finetune.parse_settings([*job, "--output", "unused"])
    set_seed(settings.seed)
    config = LlamaConfig(**TINY_LLAMA)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = get_scheduler("cosine", optimizer, 0, 7)
    data = finetune.build_data(settings, finetune.models.byte_tokenizer())
    losses = []
    for step in range(7):
        ((row,),) = data.stages[0].order.micro_batches(step, 0)
        ids = torch.tensor([row["input_ids"]])
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        if step + 1 != left_out:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return losses


def test_a_skipped_step_is_left_out_and_a_resumed_run_knows_of_it(
    job: list[str], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    flags = [*job, "--skip-bad-steps", "1", "--save-every", "5", "--output", str(whole)]
    with planted(GRADIENT, 4):
        finetune.main(flags)
    lines = strict(whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "skipped" in line] == [4]
    assert lines[3]["grad_norm"] is None
    assert lines[3]["non_finite"] == {"grad_norm": "nan"}
    assert f"gradient of weight {GRADIENT} is not finite" in lines[3]["skipped"]
    ((row,),) = (
        finetune.build_data(finetune.parse_settings(flags), finetune.models.byte_tokenizer())
        .stages[0]
        .order.indices(3, 0)
    )
    assert lines[3]["skipped"].endswith(f"its rows: row {row} (document 0)")
    wanted = without_step(job, 4)
    assert [line["loss"] for line in lines] == pytest.approx(wanted, rel=1e-5)

    parts = tmp_path / "parts"
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "final")
    finetune.main([*flags[:-1], str(parts), "--resume"])
    assert numbers(parts) == numbers(whole)
    ours, theirs = (load_file(f / "final" / "model.safetensors") for f in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    shutil.rmtree(parts / "final")
    with planted("loss", 1), pytest.raises(BadStepError, match="1 steps were skipped before it"):
        finetune.main([*flags[:-1], str(parts), "--resume"])


def test_a_bad_step_ends_a_run_and_only_good_states_are_saved(
    job: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with planted("model.layers.0.self_attn.o_proj", 4), pytest.raises(BadStepError) as raised:
        finetune.main([*job, "--save-every", "1", "--output", str(out)])
    assert "skip_bad_steps=0, so the run ends" in str(raised.value)
    assert "first on rank 0: " in str(raised.value)
    assert " model.layers.0.self_attn.o_proj (" in str(raised.value)
    assert [line["step"] for line in strict(out)] == [1, 2, 3]
    saved = sorted(path.name for path in out.glob("checkpoint*"))
    assert saved == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert not (out / "final").exists()


def test_a_weight_that_is_nan_is_named_before_the_first_step(
    job: list[str], base: Path, tmp_path: Path
) -> None:
    file = base / "model.safetensors"
    weights = load_file(file)
    weights[GRADIENT][3, 4] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    for kind in ("--full", "--lora"):
        out = tmp_path / kind
        flags = [*(flag for flag in job if flag != "--full"), kind]
        with pytest.raises(ValueError, match=r"up_proj\.\S*weight has 1 values that are not fin"):
            finetune.main([*flags, *flags_of(model=base, output=out)])
        assert not (out / "metrics.jsonl").exists()


def fails(flags: list[str], place: str) -> str:
    odd = planted(place, 3, when=lambda: dist.get_rank() == 1)
    with odd, pytest.raises(BadStepError) as raised:
        finetune.main(flags)
    return str(raised.value)


@pytest.mark.parametrize(("ring", "place"), [(1, "loss"), (2, "model.layers.1.mlp.down_proj")])
def test_all_ranks_end_alike_and_name_the_rank_at_fault(
    job: list[str], tmp_path: Path, ring: int, place: str
) -> None:
    """A NaN of rank 1 alone: in its loss, as a replica of DDP; in a layer, beside a rank of the
    same row, whose gradients are then NaN too."""
    out = tmp_path / "out"
    messages = run_launched(fails, 2, [*job, *flags_of(ring=ring, save_every=1, output=out)], place)
    assert len(set(messages)) == 1
    assert "the loss is nan on rank 1;" in messages[0]
    assert "first on rank 1: " in messages[0]
    assert ("the loss is nan, and every layer" if ring == 1 else place) in messages[0]
    assert [line["step"] for line in strict(out)] == [1, 2]
    assert not (out / "final").exists()


def drifts(flags: list[str], factor: float) -> str:
    """Train with a factor on rank 1's attention in evaluation mode, where ranks share a row."""
    build = finetune.build_model

    def flawed(*args: Any) -> Any:
        model = build(*args)

        def spoil(module: Any, _: Any, output: Any) -> Any:
            shares = output[0].shape[1] < 64 and not module.training and dist.get_rank() == 1
            return (output[0] * factor, *output[1:]) if shares else output

        model.model.layers[0].self_attn.register_forward_hook(spoil)
        return model

    with mock.patch.object(finetune, "build_model", flawed):
        try:
            finetune.main(flags)
        except DriftError as error:
            return str(error)
    return ""


def test_the_sentinel_of_a_run_is_fatal(job: list[str], tmp_path: Path) -> None:
    """That it changes no number is bound beside trainers."""
    flags = [*job, "--ring", "2", "--sentinel-every", "2", "--output"]
    assert run_launched(drifts, 2, [*flags, str(tmp_path / "watched")], 1.0) == ["", ""]
    said = run_launched(drifts, 2, [*flags, str(tmp_path / "drifts")], 1.05)
    assert said[0] == said[1]
    assert "beyond the bound of 0.0001" in said[0]
    errors = [line.get("sentinel_error") for line in strict(tmp_path / "watched")]
    assert [error is not None for error in errors] == [False, True] * 3 + [False]
    assert max(filter(None, errors)) < 1e-5
    assert [line["step"] for line in strict(tmp_path / "drifts")] == [1]
    assert not (tmp_path / "drifts" / "final").exists()


RULES: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"learning_rate": 1e30}, "learning_rate=1e[+]30: a number from 0 to 100"),
    "rate inf": ({"learning_rate": math.inf}, "learning_rate=inf: it must be a finite number"),
    "rate nan": ({"learning_rate": math.nan}, "learning_rate=nan"),
    "rate below": ({"learning_rate": -1e-4}, "learning_rate=-0.0001"),
    "decay": ({"weight_decay": math.nan}, "weight_decay=nan"),
    "decay below": ({"weight_decay": -0.1}, "weight_decay=-0.1: a number from 0"),
    "both": ({"learning_rate": 50.0, "weight_decay": 0.1}, "multiplies each weight by 1 - 5"),
    "norm": ({"max_grad_norm": math.nan}, "max_grad_norm=nan"),
    "norm below": ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
}
OF_TRAINERS: dict[str, tuple[dict[str, Any], str]] = {
    "beta1": ({"adam_beta1": 1.0}, "adam_beta1=1.0: a number from 0 to below 1"),
    "beta2": ({"adam_beta2": -0.1}, "adam_beta2=-0.1"),
    "epsilon": ({"adam_epsilon": 0.0}, "adam_epsilon=0.0: a number above 0"),
    "any": ({"warmup_steps": math.inf}, "warmup_steps=inf: it must be a finite number"),
}


@pytest.mark.parametrize("name", RULES)
def test_settings_that_cannot_give_finite_numbers_are_refused(name: str) -> None:
    values, message = RULES[name]
    with pytest.raises(ValueError, match=message):
        settings_of(**values)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("config", [SFTConfig, DPOConfig])
def test_so_are_arguments_of_trainers_and_their_defaults_are_not(config: Any) -> None:
    usual = {"output_dir": "out", "report_to": [], "use_cpu": True, "bf16": False}
    check_numbers(config(**usual))
    for values, message in (RULES | OF_TRAINERS).values():
        with pytest.raises(ValueError, match=message):
            check_numbers(config(**usual | values))


def test_lines_of_metrics_are_strict_json() -> None:
    line = strict_line({"step": 3, "loss": math.nan, "eval_loss": -math.inf, "skipped": "why"})
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 3,
        "loss": None,
        "eval_loss": None,
        "skipped": "why",
        "non_finite": {"loss": "nan", "eval_loss": "-inf"},
    }
