"""Trainers' checkpoints that are written while the training goes on: of two ranks, whose threads
are held up so that they write while later steps are done."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from longctx_patch import LongContextConfig, LongContextTrainer, trainer_parallelism
from longctx_patch.checkpoints import background
from longctx_patch.checkpoints.manifest import MANIFEST, problems_of
from longctx_patch.checkpoints.plain_pickle import METADATA
from longctx_patch.trainer import sealing
from longctx_patch.trainer.saved_states import STATES, reasons_to_wait
from longctx_patch.trainer.watching import HealthCallback
from tests.plugin.launched import run_launched, sharding_on_cpus
from tests.trainer.trained import Case, rows, weights_after

USUAL: dict[str, Any] = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3}
USUAL |= {"save_strategy": "steps", "save_steps": 2}
RING: dict[str, Any] = {"ring_degree": 2}
CASE = Case("background", config=RING, arguments=USUAL, model={"tie_word_embeddings": True})
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
BEST |= {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
SHARDED: dict[str, Any] = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
SHARDED |= {"state_dict_type": "SHARDED_STATE_DICT"}
STEP_S = 60.0


class AtStep(TrainerCallback):
    """Calls a function when a step is done, before anything is saved of it."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        self._number, self._act = number, act
        self.done = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done = state.global_step
        if self.done == self._number:
            self._act()


class Reads(TrainerCallback):
    """A tracker that looks for weights as they are saved."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.found.append((folder / "model.safetensors").is_file())


def case_of(**arguments: Any) -> Case:
    return replace(CASE, arguments=USUAL | arguments)


def trained(
    folder: Path, resume: Any = None, case: Case = CASE, *, late: bool = True, **options: Any
) -> dict[str, Tensor]:
    options |= {"eval_dataset": rows(3, seed=2), "save_in_background": late}
    return weights_after(case, folder, resume, **options)


@contextmanager
def held_up(step: int) -> Iterator[threading.Event]:
    """Checkpoint number `step` is written once the event is set."""
    may_write, complete = threading.Event(), LongContextTrainer._complete

    def waits(self: Any, folder: Path, *given: Any) -> None:
        if folder.name == f"checkpoint-{step}":
            assert may_write.wait(STEP_S)
        complete(self, folder, *given)

    with patch.object(LongContextTrainer, "_complete", waits):
        yield may_write


def whole(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))


def saved_late(folder: Path, case: Case = CASE) -> tuple[dict[str, Tensor], list[str]]:
    """A run whose first checkpoint is written when one more step is done, and what is whole before
    that."""
    found: list[str] = []

    def release() -> None:
        found.extend(whole(folder))
        may_write.set()

    with held_up(2) as may_write:
        weights = trained(folder, case=case, callbacks=[AtStep(3, release)])
    return weights, found


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], w) for n, w in other.items())


def fails(folder: Path) -> dict[str, Any]:
    """A run whose first checkpoint can't be written, and how many steps it does."""
    failed, begins = threading.Event(), AtStep(3, lambda: failed.wait(STEP_S))

    def no_space(folder: Path, group: Any) -> None:
        failed.set()
        raise OSError(28, "No space left on device", str(folder))

    with (
        patch.object(sealing, "seal", no_space),
        pytest.raises(OSError, match="No space left") as raised,
    ):
        trained(folder, callbacks=[begins])
    return {"notes": raised.value.__notes__, "done": begins.done, "whole": whole(folder)}


def waits(folder: Path) -> tuple[list[bool], list[str], list[str]]:
    """Runs that wait for their checkpoints: read by a callback, and without room for a copy."""
    reads, said, found = Reads(), list[str](), list[str]()
    look = AtStep(2, lambda: found.extend(whole(folder / "full")))
    with patch.object(sealing.logger, "warning", lambda _, text: said.append(text)):
        trained(folder / "read", case=case_of(max_steps=2), callbacks=[reads])
        with patch.object(background, "available_bytes", lambda: 2**10):
            trained(folder / "full", case=case_of(max_steps=2, save_steps=1), callbacks=[look])
    return reads.found, said, found


def over_ddp(folder: str) -> dict[str, Any]:
    out, found = Path(folder), dict[str, Any]()
    wanted = trained(out / "waited", late=False)
    late, found["before"] = saved_late(out / "late")
    found["trained"], found["weights"] = same(late, wanted), wanted
    found["best"], _ = saved_late(out / "best", case_of(**BEST))
    found["fails"] = fails(out / "fails")
    found["waits"] = waits(out / "waits")
    return found


@pytest.mark.timeout(300)
def test_under_ddp_and_fsdp2(tmp_path: Path) -> None:
    by_rank = run_launched(over_ddp, 2, str(tmp_path))
    for found in by_rank:
        assert found["before"] == []
        assert found["trained"]
        assert found["fails"]["done"] == 3
        assert found["fails"]["whole"] == []
        assert found["fails"]["notes"] == ["while checkpoint-2 is written"]
    for step in (2, 4):
        late, waited = (tmp_path / name / f"checkpoint-{step}" for name in ("late", "waited"))
        check_same_files(late, waited)
    # The evaluation after the first steps was the best: it is kept to the end, and alone then.
    assert whole(tmp_path / "best") == ["checkpoint-2"]
    weights = load_file(tmp_path / "waited" / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(by_rank[0]["best"][name], w) for name, w in weights.items())
    reads, said, found = by_rank[0]["waits"]
    assert reads == [True]
    assert found == ["checkpoint-1"]
    assert said[0] == "training waits while checkpoints are written: Reads.on_save may read them."
    assert "GiB of host memory and has 0.0." in said[1]
    assert len(said) == 2
    check_fsdp2(tmp_path, by_rank[0]["weights"])


def check_fsdp2(folder: Path, of_ddp: dict[str, Tensor]) -> None:
    """Under FSDP2, and from one to the other."""
    late, out = folder / "late" / "checkpoint-2", folder / "fsdp2"
    by_rank = run_launched(over_fsdp2, 2, str(out), str(late))
    on_two, _ = run_launched(of_fsdp2, 2, str(out), 2)
    (alone,) = run_launched(of_fsdp2, 1, str(out), 1)
    for found in by_rank:
        assert found["whole"]
        assert found["lora"]
        assert same(found["of ddp"], of_ddp)
    for name in ("whole", "lora"):
        check_same_files(*(out / name / each / "checkpoint-2" for each in ("late", "waited")))
    wanted = by_rank[0]["whole trained"]
    assert same(on_two, wanted)
    torch.testing.assert_close(alone, wanted, rtol=1e-5, atol=1e-6)
    last = load_file(out / "whole" / "late" / "checkpoint-4" / "model.safetensors")
    assert last.keys() == wanted.keys() - {"lm_head.weight"}  # tied: it is saved once
    assert all(torch.equal(weight, wanted[name]) for name, weight in last.items())
    adapter = load_file(out / "lora" / "late" / "checkpoint-4" / "adapter_model.safetensors")
    trained = {n: w for n, w in by_rank[0]["lora trained"].items() if "lora_" in n}
    assert sorted(map(str, adapter.values())) == sorted(map(str, trained.values()))


def check_same_files(late: Path, waited: Path) -> None:
    """The same files with the same content, whether the training waited or not."""
    assert problems_of(late) == []
    names = {path.name for path in waited.iterdir()}
    assert {path.name for path in late.iterdir()} == names
    assert (late / STATES / METADATA).is_file()
    for path in sorted(waited.iterdir()):
        other = late / path.name
        if path.is_dir():
            assert_equal(*map(states_in, (path, other)))
        elif path.suffix == ".pt":
            assert_equal(*(torch.load(each, weights_only=True) for each in (path, other)))
        elif path.suffix in (".safetensors", ".pth"):
            assert path.read_bytes() == other.read_bytes(), path.name


def states_in(folder: Path) -> Any:
    whole = folder.with_suffix(".whole")
    dcp_to_torch_save(folder, whole)
    return torch.load(whole, weights_only=True)


def assert_equal(one: Any, other: Any) -> None:
    leaves, form = tree_flatten(one)
    others, same_form = tree_flatten(other)
    assert form == same_form
    for mine, theirs in zip(leaves, others, strict=True):
        is_same = torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
        assert is_same


def over_fsdp2(folder: str, of_ddp: str) -> dict[str, Any]:
    """Weights that are sharded, all of them and an adapter's."""
    out, found = Path(folder), dict[str, Any]()
    with sharding_on_cpus():
        sharding = {"fsdp": True, "fsdp_config": SHARDED}
        axis = trainer_parallelism(LongContextConfig(**RING), 2)
        whole = replace(CASE, sharding=sharding | {"parallelism_config": axis})
        lora = replace(whole, adapters={"r": 2, "target_modules": ["q_proj", "v_proj"]})
        for name, case in (("whole", whole), ("lora", lora)):
            wanted = trained(out / name / "waited", case=case, late=False)
            late, before = saved_late(out / name / "late", case)
            checkpoint = str(out / name / "late" / "checkpoint-2")
            resumed = trained(out / name / "on", checkpoint, case)
            found[name] = same(late, wanted) and same(resumed, wanted) and not before
            found[f"{name} trained"] = wanted
        found["of ddp"] = trained(out / "of_ddp", of_ddp, whole)
    return found


def of_fsdp2(folder: str, world: int) -> dict[str, Tensor]:
    """One process, or two under DDP, go on from what two have sharded."""
    case = replace(CASE, config=RING if world == 2 else {})
    return trained(Path(folder) / f"of_{world}", f"{folder}/whole/late/checkpoint-2", case)


class Own(LongContextTrainer):
    def save_model(self, *args: Any, **kwargs: Any) -> None:
        super().save_model(*args, **kwargs)


def reason(
    kind: type[LongContextTrainer] = LongContextTrainer, callback: Any = None, **changes: Any
) -> str:
    """Why such a trainer waits for its checkpoints."""
    trainer: Any = kind.__new__(kind)
    usual = {"push_to_hub": False, "hub_strategy": "every_save"}
    trainer.args = SimpleNamespace(**usual | changes)
    callbacks = [HealthCallback(trainer, None), *([callback] if callback else [])]
    trainer.callback_handler = SimpleNamespace(callbacks=callbacks)
    return next(reasons_to_wait(trainer), "")


def test_who_may_look_into_a_checkpoint_gets_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reason()
    assert "hub_strategy='every_save' uploads each" in reason(push_to_hub=True)
    assert not reason(push_to_hub=True, hub_strategy="end")
    assert "Own.save_model may read" in reason(Own)
    assert "Reads.on_save may read them" in reason(callback=Reads())
    assert not reason(callback=TrainerCallback())
    wandb = integration_utils.WandbCallback.__new__(integration_utils.WandbCallback)
    for value, waits in (("", False), ("end", False), ("checkpoint", True)):
        monkeypatch.setenv("WANDB_LOG_MODEL", value)
        assert bool(reason(callback=wandb)) == waits
    flyte = integration_utils.FlyteCallback.__new__(integration_utils.FlyteCallback)
    assert "FlyteCallback.on_save may read" in reason(callback=flyte)
