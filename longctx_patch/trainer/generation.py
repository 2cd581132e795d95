"""TRL's trainers that generate what they learn from, GRPO and RLOO: one set of rows for each group.

Every rank of a group generates whole rows on the stock path, from the same seed, and takes what its
group's first rank has, so that they train on the same rows whatever a kernel rounds. Rewards,
advantages and what is logged are those of as many processes as there are groups: TRL reads its
process's number and gathers over all processes, so while it does, its Accelerator says that each
group is one process.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from accelerate.utils.operations import recursively_apply

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

GENERATING = frozenset({"GRPOTrainer", "RLOOTrainer"})
"""Trainers of TRL that this file knows."""

_UNSUPPORTED = {
    "use_vllm": "vLLM would generate for each process by itself, and take its weights",
    "use_transformers_continuous_batching": "it switches the model's attention to a paged one",
}
_AT_PROMPTS = "tools", "environments", "rollout_func"


def generating_class(trainer: Any) -> type | None:
    """The class of TRL by which a trainer generates; None if it doesn't."""
    for cls in type(trainer).__mro__:
        if cls.__name__ in GENERATING and cls.__module__.split(".")[0] == "trl":
            return cls
    return None


def generation_problems(trainer: Any, degree: int) -> Iterable[str]:
    """Says what a generating trainer asks for that is refused, in words."""
    cls = generating_class(trainer)
    if cls is None or degree == 1:
        return
    for name, reason in _UNSUPPORTED.items():
        if getattr(trainer.args, name, False):
            yield f"{name}=True: {reason}, while ranks share a sequence. Leave it out."
    for name in _AT_PROMPTS:
        if getattr(trainer, name, None):
            yield (
                f"{name}: each rank that shares a sequence would call them once more, and may get "
                "another answer. Leave it out, or train on one process per sequence."
            )


def settle_generation(args: Any, num_groups: int) -> None:
    """Count the rows of a generation over groups, not over processes.

    Raises ValueError if they are no whole number of prompts.
    """
    if not hasattr(args, "steps_per_generation"):
        return
    rows = args.per_device_train_batch_size * num_groups * args.steps_per_generation
    _require_whole_prompts("per_device_train_batch_size", rows, args.num_generations)
    if args.do_eval and str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
        held_out = args.num_generations_eval or args.num_generations
        rows_of_step = args.per_device_eval_batch_size * num_groups
        _require_whole_prompts("per_device_eval_batch_size", rows_of_step, held_out)
    args.generation_batch_size = rows


def _require_whole_prompts(name: str, rows: int, num_generations: int) -> None:
    if rows % num_generations:
        raise ValueError(
            f"{rows} rows over all sequence groups, with {num_generations} generations of each "
            f"prompt: ranks that share a sequence have the same rows, which count once. Set {name} "
            "so that they are whole prompts."
        )


class GroupsAsProcesses:
    """An Accelerator to which each sequence group is one process."""

    def __init__(self, accelerator: Accelerator, degree: int) -> None:
        self._accelerator, self._degree = accelerator, degree

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    @property
    def process_index(self) -> int:
        """The number of this process's group."""
        return self._accelerator.process_index // self._degree

    @property
    def num_processes(self) -> int:
        return self._accelerator.num_processes // self._degree

    def gather(self, data: Any) -> Any:
        """Tensors of each group's first rank. Collective over all processes."""
        world = self._accelerator.num_processes
        if world == 1:
            return self._accelerator.gather(data)
        return recursively_apply(
            lambda x: x.unflatten(0, (world, -1))[:: self._degree].flatten(0, 1),
            self._accelerator.gather(data),
        )

    def gather_object(self, data: list[Any]) -> list[Any]:
        """Lists of each group's first rank, joined. Collective over all processes."""
        is_first = self._accelerator.process_index % self._degree == 0
        found: list[Any] = gather_object(data if is_first else [])
        return found

    def of_first_rank(self, value: Any) -> Any:
        """Returns what the first rank of this group has. Collective over all processes."""
        return gather_object([value])[self.process_index * self._degree]


class GenerationMixin(_Trainer):
    """The overrides for GRPO and RLOO; of other trainers it changes nothing."""

    _groups: GroupsAsProcesses

    def seed_groups(self) -> None:
        """Seed this process as TRL seeds the process of its group's number."""
        if generating_class(self) is not None:
            set_seed(self.args.seed + self._groups.process_index)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's completions, on the stock path: those of the group's first rank."""
        training = self.model.training
        self.model.eval()
        try:
            found = super()._generate_single_turn(*args, **kwargs)
        finally:
            self.model.train(training)
        return self._groups.of_first_rank(found)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_groups():
            return super()._generate_and_score_completions(*args, **kwargs)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_groups():
            return super()._compute_loss(*args, **kwargs)

    @contextmanager
    def _as_groups(self) -> Iterator[None]:
        """Within the context TRL's methods take a group for a process."""
        cls, groups = generating_class(self), self._groups
        if cls is None or self.__dict__["accelerator"] is groups:
            yield
            return
        names: dict[str, Callable[..., Any]] = {
            "gather": groups.gather,
            "gather_object": groups.gather_object,
        }
        module, mine = vars(sys.modules[cls.__module__]), self.__dict__
        accelerator = mine["accelerator"]
        before = {name: module[name] for name in names}  # TRL imports both by name
        mine["accelerator"] = groups
        module.update(names)
        try:
            yield
        finally:
            module.update(before)
            mine["accelerator"] = accelerator
