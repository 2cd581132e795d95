"""What trainers that generate ask for and can't be exact is refused; rows count once per group."""

from types import SimpleNamespace
from typing import Any

import pytest
from trl import GRPOTrainer, RLOOTrainer, SFTTrainer

from longctx_patch.trainer.generation import (
    GroupsAsProcesses,
    generation_problems,
    settle_generation,
)
from tests.plugin.launched import run_launched


def made(cls: Any, *, args: dict[str, Any] | None = None, **attributes: Any) -> Any:
    """A trainer without its long way of being made."""
    trainer = object.__new__(cls)
    vars(trainer).update(attributes, args=SimpleNamespace(**args or {}))
    return trainer


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"args": {"use_vllm": True}}, "use_vllm=True: vLLM would generate for each process"),
        (
            {"args": {"use_transformers_continuous_batching": True}},
            "use_transformers_continuous_batching=True: it switches the model's attention",
        ),
        ({"tools": [print]}, "tools: each rank that shares a sequence would call them once more"),
        ({"environments": [1]}, "environments: each rank"),
        ({"rollout_func": print}, "rollout_func: each rank"),
    ],
)
@pytest.mark.parametrize("cls", [GRPOTrainer, RLOOTrainer])
def test_what_each_rank_would_do_by_itself(cls: Any, asked: dict[str, Any], says: str) -> None:
    assert [p.startswith(says) for p in generation_problems(made(cls, **asked), 2)] == [True]
    assert not list(generation_problems(made(cls, **asked), 1))
    assert not list(generation_problems(made(cls), 2))
    assert not list(generation_problems(made(SFTTrainer, **asked), 2))


def generating(**options: Any) -> Any:
    usual = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "steps_per_generation": 3,
        "num_generations": 6,
        "num_generations_eval": 2,
        "generation_batch_size": 24,
        "do_eval": True,
        "eval_strategy": "steps",
    }
    return SimpleNamespace(**usual | options)


def test_rows_of_a_generation_are_those_of_groups() -> None:
    args = generating()
    settle_generation(args, num_groups=2)
    assert args.generation_batch_size == 12
    with pytest.raises(ValueError, match=r"6 rows .* 4 generations.*per_device_train_batch_size"):
        settle_generation(generating(num_generations=4), num_groups=1)
    with pytest.raises(ValueError, match=r"2 rows .* 3 generations .*per_device_eval_batch_size"):
        settle_generation(generating(num_generations_eval=3), num_groups=1)
    settle_generation(generating(num_generations_eval=3, eval_strategy="no"), num_groups=1)
    settle_generation(SimpleNamespace(), num_groups=1)  # another trainer's arguments


def seen_by_groups() -> list[Any]:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    groups = GroupsAsProcesses(accelerator, 2)
    rank = accelerator.process_index
    return [
        groups.process_index,
        groups.num_processes,
        groups.gather(torch.tensor([rank, 10 * rank])).tolist(),
        groups.gather(torch.tensor(rank)).tolist(),
        groups.gather_object([f"row of {rank}"]),
        groups.of_first_rank(rank),
        groups.device.type,
    ]


def test_a_group_is_one_process() -> None:
    found = run_launched(seen_by_groups, 4)
    same = [2, [0, 0, 2, 20], [0, 2], ["row of 0", "row of 2"]]
    assert found == [[rank // 2, *same, rank // 2 * 2, "cpu"] for rank in range(4)]
