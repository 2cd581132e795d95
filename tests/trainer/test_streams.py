"""Trainers read and evaluate in other orders and forms, with the numbers of one process: streams
with and without a length, also where a run goes on; an evaluation or a prediction before training;
and batches without any label."""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from longctx_patch import LongContextConfig, LongContextTrainerMixin
from longctx_patch.trainer.refusals import explains_missing_logits
from tests.hf.tiny import featured_model
from tests.plugin.launched import run_launched, sharding_on_cpus
from tests.trainer.trained import (
    Case,
    Trained,
    complaints,
    found_of,
    make_trainer,
    numbers,
    padded,
    rows,
    sharded,
)

EPOCHS: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
ACCUMULATED = {"max_steps": 6, "gradient_accumulation_steps": 2}
FEW: dict[str, Any] = {"max_steps": 4}
RING: dict[str, Any] = {"ring_degree": 2}
ULYSSES: dict[str, Any] = {"ulysses_degree": 2}


def labelled(number: int, seed: int) -> list[dict[str, list[int]]]:
    """Rows of which every token has a label."""
    return [row | {"labels": list(row["input_ids"])} for row in rows(number, seed)]


class Stream(IterableDataset):
    """Rows one after the other."""

    def __init__(self, number: int) -> None:
        self.rows = labelled(number, seed=5)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.rows)


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class StopsEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= 2


Make = Callable[..., Trainer]


def goes_on(make: Make, folder: str) -> Trainer:
    """From a checkpoint in the middle of an epoch."""
    given = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    case = Case("goes on", config=RING, arguments=given)
    first = make(case, folder, train_dataset=Stream(13), callbacks=[StopsEarly()])
    first.train()
    if isinstance(first, LongContextTrainerMixin):
        first.unpatch()
    again = make(case, folder, train_dataset=Stream(13))
    resume: Any = f"{folder}/checkpoint-2"
    again.train = functools.partial(again.train, resume_from_checkpoint=resume)
    return again


def evaluated_first(make: Make, folder: str) -> Trainer:
    trainer = make(Case("evaluated", config=RING, arguments=FEW), folder)
    trainer.evaluate()
    return trainer


def predicted_first(make: Make, folder: str) -> Trainer:
    """Under mixed precision, for which Accelerate gives the model another forward."""
    config = ULYSSES | {"loss": "logits"}
    trainer = make(Case("predicted", config=config, arguments=FEW | {"bf16": True}), folder)
    for _ in range(2):
        trainer.predict(labelled(3, seed=4))
    return trainer


def of(case: Case, **options: Any) -> Callable[[Make, str], Trainer]:
    return lambda make, folder: make(case, folder, **options)


RUNS: dict[str, Callable[[Make, str], Trainer]] = {
    "stream": of(Case("s", config=RING, arguments=ACCUMULATED), train_dataset=Stream(13)),
    "sized stream": of(Case("z", config=ULYSSES, arguments=EPOCHS), train_dataset=Sized(12)),
    "evaluated stream": of(Case("e", config=RING, arguments=FEW), eval_dataset=Stream(7)),
    "rows without labels": of(
        Case("n", config=RING, arguments=FEW | {"per_device_eval_batch_size": 1}),
        eval_dataset=rows(5, seed=5),
    ),
    "goes on": goes_on,
    "evaluated first": evaluated_first,
    "predicted first": predicted_first,
}
BF16 = {"predicted first": 3e-2}
"""Bounds beside 1e-5: of runs whose products are rounded to 16 bits."""


def run_all(folder: str, is_patched: bool) -> dict[str, Trained]:
    make = functools.partial(make_trainer, is_patched=is_patched)
    found = {}
    for name, start in RUNS.items():
        trainer = start(make, f"{folder}/{name}")
        trainer.train()
        if is_patched:
            assert isinstance(trainer.model_wrapped, DistributedDataParallel), name
        found[name] = found_of(trainer, numbers(trainer.evaluate()))
        if isinstance(trainer, LongContextTrainerMixin):
            trainer.unpatch()
    return found


def run_on_two(folder: str) -> tuple[dict[str, Trained], str]:
    return run_all(folder, True), check_missing_logits(folder)


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    """A loss that reads logits is told how to have them."""
    (one,) = run_launched(run_all, 1, str(tmp_path / "one"), False)
    for found, said in run_launched(run_on_two, 2, str(tmp_path / "two")):
        assert "With loss='chunked' a batch with labels has no outputs.logits" in said
        assert 'LongContextConfig(loss="logits")' in said
        assert "token_log_probs(inputs, model=model)" in said
        for name, wanted in one.items():
            wrong = complaints(found[name], wanted, BF16.get(name, 1e-5))
            assert not wrong, "\n".join([name, *wrong])


class Reads(Trainer):
    """Computes its loss from logits."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).logits[:, :-1].square().mean()


def check_groups(folder: str) -> list[Trained]:
    """Four ranks in two groups: evaluated first under DDP; and what is refused."""
    arguments = FEW | {"per_device_train_batch_size": 1}
    found = []
    for sharding in ({}, sharded(RING, "LlamaDecoderLayer", 1)):
        case = Case("groups", config=RING, arguments=arguments, sharding=sharding)
        with sharding_on_cpus() if sharding else nullcontext():
            trainer = make_trainer(case, folder, is_patched=True, train_dataset=Sized(8))
            if sharding:
                with pytest.raises(ValueError, match=r"before training under FSDP2.*eval_on_start"):
                    trainer.evaluate()
            else:
                trainer.evaluate()
            trainer.train()
        found.append(losses_of(trainer))
    for dataset in (Stream(7), Sized(7)):
        with pytest.raises(ValueError, match=r"is read as a stream.*2 sequence groups: Accelerate"):
            trainer.evaluate(dataset)
    return found


def train_alone(folder: str) -> Trained:
    trainer = make_trainer(
        Case("alone", arguments=FEW), folder, is_patched=False, train_dataset=Sized(8)
    )
    trainer.train()
    return losses_of(trainer)


def losses_of(trainer: Trainer) -> Trained:
    found = found_of(trainer, {})
    return found._replace(logged=[entry for entry in found.logged if "loss" in entry])


def test_two_groups_read_a_stream_as_one_process_with_twice_the_batch(tmp_path: Path) -> None:
    (one,) = run_launched(train_alone, 1, str(tmp_path / "one"))
    for of_rank in run_launched(check_groups, 4, str(tmp_path / "four")):
        for found in of_rank:
            wrong = complaints(found, one)
            assert not wrong, "\n".join(wrong)


def check_missing_logits(folder: str) -> str:
    trainer_class = type("MyTrainer", (LongContextTrainerMixin, Reads), {})
    args = TrainingArguments(folder, use_cpu=True, max_steps=1, report_to=[], save_strategy="no")
    trainer = trainer_class(
        model=featured_model("llama"),
        args=args,
        train_dataset=labelled(4, seed=1),
        data_collator=padded,
        long_context=LongContextConfig(**RING),
    )
    with pytest.raises(TypeError) as raised:
        trainer.train()
    return "\n".join(raised.value.__notes__)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (LongContextConfig(**RING, loss="logits"), TypeError("'NoneType' object is not iterable")),
        (LongContextConfig(), TypeError("'NoneType' object is not iterable")),
        (LongContextConfig(**RING), TypeError("an int is no list")),
    ],
)
def test_another_error_is_left_as_it_is(config: LongContextConfig, error: TypeError) -> None:
    with pytest.raises(TypeError) as raised, explains_missing_logits(config):
        raise error
    assert not hasattr(raised.value, "__notes__")
