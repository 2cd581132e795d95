"""Ranks that don't agree are refused on all of them, before the first step and while they train."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from longctx_patch.health.agreement import model_facts, require_agreement, versions
from longctx_patch.health.replicas import EVERY, ReplicaCheck, ReplicasDivergedError, bit_sum
from longctx_patch.recipes import finetune, sft
from tests.harness import run_distributed
from tests.hf.tiny import tiny_model
from tests.plugin.launched import run_launched
from tests.recipes.conftest import *  # noqa: F403  # the fixtures of a model's config and a text


def message(check: Callable[[], None], error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        check()
    return str(caught.value)


def facts_that_differ(rank: int) -> list[str]:
    same = {"settings": {"learning_rate": 1e-4, "steps": 5}, "versions": versions()}
    require_agreement(same, "how to train")
    odd = {"settings": {"learning_rate": 1e-3 if rank == 2 else 1e-4, "steps": 5}}
    more = {"settings": {"steps": 5 + rank}, **({"extra": 1} if rank else {})}
    many = {f"name {n}": rank for n in range(10)}
    return [message(lambda f=f: require_agreement(f, "how to train")) for f in (odd, more, many)]  # type: ignore[misc]


def test_fields_ranks_and_values_are_named_on_all_ranks() -> None:
    found = run_distributed(facts_that_differ, 3)
    assert found[0] == found[1] == found[2]
    odd, more, many = found[0]
    assert "settings.learning_rate: 0.0001 on ranks 0, 1, 0.001 on rank 2\n" in odd
    assert "steps" not in odd
    assert "settings.steps: 5 on rank 0, 6 on rank 1, 7 on rank 2\n" in more
    assert "extra: nothing on rank 0, 1 on ranks 1, 2\n" in more
    assert many.count(" on rank 0") == 8
    assert "and 2 more fields" in many


def test_another_config_parameter_or_weight_is_another_model() -> None:
    def flat(model: nn.Module) -> str:
        return json.dumps(model_facts(model), default=str, sort_keys=True)

    same = flat(tiny_model())
    assert flat(tiny_model()) == same
    changed = []
    for change in (
        lambda m: setattr(m.config, "rms_norm_eps", 0.5),
        lambda m: m.lm_head.weight.requires_grad_(False),
        lambda m: m.to(torch.float64),
        lambda m: m.model.norm.weight.data[3].add_(1e-3),
    ):
        model = tiny_model()
        change(model)
        changed.append(flat(model))
    assert len({same, *changed}) == 5
    moved = tiny_model()
    moved.config._name_or_path = "/another/place"
    assert flat(moved) == same


def found_after(check: ReplicaCheck, first: int, last: int) -> tuple[int, str]:
    """(step, error) of the first of these steps that notices a difference; (0, "") if none does."""
    for step in range(first, last + 1):
        try:
            check.after_step(step)
        except ReplicasDivergedError as error:
            return step, str(error)
    return 0, ""


def of_one_weight(rank: int, *placements: Placement) -> nn.Module:
    """A module whose weight has other values on each rank."""
    module, mesh = nn.Module(), init_device_mesh("cpu", (2,))
    values = torch.full((4,), float(rank))
    module.weight = nn.Parameter(DTensor.from_local(values, mesh, placements, run_check=False))
    return module


def weights_that_drift(rank: int) -> list[tuple[int, str]]:
    model = tiny_model()
    check, saving = ReplicaCheck(model), ReplicaCheck(model)
    assert found_after(check, 1, 3 + EVERY) == (0, "")
    saving.require_alike(2)
    if rank == 1:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-6
    assert found_after(saving, 3, 3) == (0, "")
    with pytest.raises(ReplicasDivergedError) as unsaved:
        saving.require_alike(3)
    shards = ReplicaCheck(of_one_weight(rank, Shard(0)))
    copies = ReplicaCheck(of_one_weight(rank, Replicate()))
    found = [found_after(check, 4 + EVERY, 90), found_after(shards, 1, 60)]
    return [*found, found_after(copies, 1, 60), (3, str(unsaved.value))]


def test_replicas_that_diverge_are_found_in_time_and_before_they_are_saved() -> None:
    """One value of one weight on one rank; shards of FSDP2 are no copies of each other."""
    mine, other = run_distributed(weights_that_drift, 2)
    assert mine == other
    (step, error), shards, (_, of_copies), (_, unsaved) = mine
    assert step == 2 * EVERY + 1
    assert f"All of them were alike after step {EVERY}, and nothing has been saved since" in error
    assert unsaved.startswith("after step 3 the trained weights of rank 1 are not those of rank 0")
    assert "All of them were alike after step 2," in unsaved
    assert "the trained weights of rank 1 are not those of rank 0 any more, in " in error
    assert "up_proj" in error
    assert shards == (0, "")
    assert "weights of rank 1 are not those of rank 0" in of_copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_single_bit_changes_the_sum(dtype: torch.dtype) -> None:
    weight = torch.randn(7, 5).to(dtype)
    before = int(bit_sum(weight))
    flipped = weight.clone().view(torch.uint8)
    for byte in range(weight.nbytes):
        for bit in range(8):
            other = flipped.clone()
            other.view(-1)[byte] ^= 1 << bit
            assert int(bit_sum(other.view(dtype))) != before


def odd_run(flags: list[str], folder: str) -> str:
    """What each rank says when rank 1 is started with other settings, from another launch file."""
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = ["true", "false"][int(os.environ["RANK"])]
    more = ["--save-every", "2"] if os.environ["RANK"] == "1" else []
    steps = str(4 + int(os.environ["RANK"]))
    words = [*flags, *more, "--max-steps", steps, "--full", "--output", folder]
    return message(lambda: finetune.main(words))


def odd_sft(flags: list[str]) -> str:
    """The same of the recipe sft, whose model isn't loaded before all agree."""
    os.environ["ACCELERATE_USE_FSDP"] = ["true", "false"][int(os.environ["RANK"])]
    rate = ["0.1", "0.2"][int(os.environ["RANK"])]
    with patch("longctx_patch.recipes.trl_run.load", side_effect=AssertionError):
        return message(lambda: sft.main([*flags, "--learning-rate", rate]))


def test_sft_refuses_one_rank_before_a_model_is_loaded(
    config_file: Path, text_file: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(config_file), "--data", str(text_file), "--seq-len", "64"]
    flags += ["--ring", "2", "--use-cpu", "--bf16", "false", "--max-steps", "4"]
    flags += ["--output-dir", str(tmp_path / "out")]
    for said in run_launched(odd_sft, 2, flags):
        assert "ACCELERATE_USE_FSDP: 'true' on rank 0, 'false' on rank 1\n" in said
        assert "arguments.learning_rate: 0.1 on rank 0, 0.2 on rank 1\n" in said


def test_the_recipe_refuses_one_rank_that_is_started_otherwise(
    config_file: Path, text_file: Path, tmp_path: Path
) -> None:
    """Ranks with another precision or config are refused beside trainers (tests/trainer)."""
    flags = ["--model", str(config_file), "--text", str(text_file)]
    flags += ["--seq-len", "64", "--ring", "2"]
    for said in run_launched(odd_run, 2, flags, str(tmp_path / "out")):
        assert "settings.max_steps: 4 on rank 0, 5 on rank 1\n" in said
        assert "settings.save_every: 0 on rank 0, 2 on rank 1\n" in said
        assert "FSDP_RESHARD_AFTER_FORWARD: 'true' on rank 0, 'false' on rank 1\n" in said
    assert not list((tmp_path / "out").glob("metrics.jsonl"))
