"""A trainer's checkpoints are sealed, what a run goes on from is checked, and the best one before
it becomes the model."""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from longctx_patch.checkpoints.manifest import MANIFEST, problems_of, read_manifest, seal
from longctx_patch.trainer import sealing
from longctx_patch.trainer.record import RECORD
from longctx_patch.trainer.sealing import SealedCheckpointsMixin
from tests.plugin.launched import run_launched
from tests.trainer.stock import Stock, Trained
from tests.trainer.trained import Case, weights_after

USUAL: dict[str, Any] = {"max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-3}
USUAL |= {"save_strategy": "steps", "save_steps": 2}
CASE = Case("sealed", config={"ring_degree": 2}, arguments=USUAL)


class WritesBeside(TrainerCallback):
    """A callback that writes a file of its own into each checkpoint, and notes what is there when
    one is complete."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            (folder / f"checkpoint-{state.global_step}" / "theirs.pt").write_bytes(b"theirs")
            self.found.append(sorted(path.name for path in folder.glob("checkpoint-*")))


def trained(
    folder: str, resume: Any = None, case: Case = CASE, **options: Any
) -> dict[str, Tensor]:
    return weights_after(case, folder, resume, **options)


def flipped(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return path


def noted(folder: Path) -> None:
    """A folder of the user's with a checkpoint's name."""
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")


def on_main(act: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def goes_on(folder: str) -> dict[str, Any]:
    """Runs of two ranks that share rows: saved, damaged in several ways, and gone on with."""
    out, found, said = Path(folder), dict[str, Any](), list[str]()
    beside = WritesBeside()
    whole = trained(str(out / "a"), callbacks=[beside])
    found["written"] = beside.found
    found["problems"] = problems_of(out / "a" / "checkpoint-6")
    found["files"] = sorted(read_manifest(out / "a" / "checkpoint-6"))

    def refused(output: str, resume: Any) -> str:
        with pytest.raises(ValueError, match=r".") as raised:
            trained(str(out / output), resume, from_zero=True)
        return str(raised.value)

    with ExitStack() as stack:
        stack.enter_context(patch.object(sealing.logger, "warning", lambda _, t: said.append(t)))
        on_main(lambda: noted(out / "b" / "checkpoint-4"))
        found["from 2"] = trained(str(out / "b"), str(out / "a" / "checkpoint-2"))
        on_main(lambda: flipped(out / "a" / "checkpoint-6" / "optimizer_state/__0_0.distcp"))
        found["damaged"] = refused("c", str(out / "a" / "checkpoint-6"))
        found["as it was"] = (out / "a" / "checkpoint-6").is_dir()
        found["newest"] = trained(str(out / "a"), True)
        said, found["said"] = [], said
        on_main(lambda: (out / "a" / "checkpoint-6" / MANIFEST).unlink())
        found["unsealed"] = refused("d", str(out / "a" / "checkpoint-6"))
        on_main(lambda: shutil.copytree(out / "a" / "checkpoint-2", out / "e" / "checkpoint-2"))
        on_main(lambda: flipped(out / "e" / "checkpoint-2" / "rng_state_1.pth"))
        found["alone"] = refused("e", str(out / "e" / "checkpoint-2"))
        found["none"] = refused("e", True)
        found["nothing"] = refused("nothing", True)
        found["missing"] = refused("c", str(out / "missing"))
        ours = str(out / "a" / "checkpoint-2") if dist.get_rank() else None
        found["disagree"] = refused("c", ours)
    same = {n: all(torch.equal(found[n][k], w) for k, w in whole.items()) for n in MODELS}
    return found | same


MODELS = "from 2", "newest"


def test_a_run_goes_on_from_what_is_whole_alone(tmp_path: Path) -> None:
    first, second = run_launched(goes_on, 2, str(tmp_path))
    assert first["from 2"]
    assert first["newest"]
    folder = tmp_path / "a"
    newest = f"The newest whole one is {folder / 'checkpoint-4'}: train(resume_from_checkpoint="
    spoilt = f"{folder / 'checkpoint-6'} is not whole: optimizer_state/__0_0.distcp is damaged"
    for name, *fragments in (
        ("damaged", spoilt, newest),
        ("unsealed", f"{MANIFEST} is missing: it was not saved to the end"),
        ("alone", "rng_state_1.pth is damaged", "beside it is whole: get it back from a copy"),
        ("none", "none of the checkpoints under"),
        ("nothing", "there is no complete checkpoint under"),
        ("missing", "the folder is missing"),
        ("disagree", "is [None, 'checkpoint-2'] on ranks 0 to 1"),
    ):
        assert first[name] == second[name], name
        assert all(words in first[name] for words in fragments), first[name]
    assert first["written"] == [
        ["checkpoint-2"],
        ["checkpoint-2", "checkpoint-4"],
        ["checkpoint-2", "checkpoint-4", "checkpoint-6"],
    ]
    assert first["problems"] == []
    ours = {"theirs.pt", "longctx.json", "rng_state_1.pth", "optimizer_state/__0_0.distcp"}
    assert ours < set(first["files"])
    assert first["as it was"]
    moved, damaged, name, going = first["said"]
    place = tmp_path / "b" / "checkpoint-4"
    assert f"{place} was no checkpoint of this package: it is now checkpoint-4.kept" in moved
    kept = [path.name for path in place.with_name("checkpoint-4.kept").iterdir()]
    assert kept == ["notes.txt"]  # not marked as ours, by which it might be deleted
    assert problems_of(place) == []
    assert damaged.startswith(f"a checkpoint is damaged: {folder / 'checkpoint-6'}: optimizer_st")
    assert name == f"going on from {folder / 'checkpoint-4'}, in which every file is whole"
    assert going == f"resume_from_checkpoint=True: going on from {folder / 'checkpoint-4'}"


def alone(folder: str) -> dict[str, Any]:
    """One process: checkpoints of a stock trainer, and what is there at the moment of sealing."""
    out, found, said = Path(folder), dict[str, Any](), list[str]()
    case = Case("alone", config={}, arguments=USUAL)
    stock = trained(str(out / "stock"), case=case, is_patched=False)
    with patch.object(sealing.logger, "warning", lambda _, text: said.append(text)):
        shutil.copytree(out / "stock" / "checkpoint-4", out / "ours" / "checkpoint-4")
        by_name = trained(str(out / "a"), str(out / "ours" / "checkpoint-4"), case)
        newest = trained(str(out / "ours"), True, case)
        found["said"], said = said, []
        (out / "stock" / "checkpoint-6" / "trainer_state.json").unlink()
        with pytest.raises(ValueError, match=r"it was not saved to the end.*newest whole one is"):
            trained(str(out / "b"), str(out / "stock" / "checkpoint-6"), case)
    found["error"] = max(
        float((weights[name] - w).abs().max())
        for weights in (by_name, newest)
        for name, w in stock.items()
    )
    there: list[list[str]] = []

    def sealed(folder: Path, group: Any = None, dies_at: int = 0) -> None:
        there.append(sorted(path.name for path in folder.parent.glob("checkpoint-*")))
        if folder.name == f"checkpoint-{dies_at}":
            raise KeyboardInterrupt
        seal(folder)

    limited = Case("limited", config={}, arguments=USUAL | {"save_total_limit": 1})
    with patch.object(sealing, "seal", sealed):
        whole = trained(str(out / "limited"), case=limited)
    found["at sealing"] = there
    found["in the end"] = sorted(p.name for p in (out / "limited").glob("checkpoint-*"))
    with (
        patch.object(sealing, "seal", lambda folder, _: sealed(folder, dies_at=4)),
        pytest.raises(KeyboardInterrupt),
    ):
        trained(str(out / "killed"), case=limited)
    found["killed"] = sorted(p.name for p in (out / "killed").glob("checkpoint-*"))
    resumed = trained(str(out / "killed"), True, limited)
    found["same"] = all(torch.equal(resumed[name], w) for name, w in whole.items())
    constant = Case("constant", config={}, arguments=USUAL | {"lr_scheduler_type": "constant"})
    last = trained(str(out / "constant"), case=constant)
    again = trained(str(out / "constant"), True, constant)
    found["ended"] = all(torch.equal(again[name], w) for name, w in last.items())
    found["weights"] = refused(out, out / "constant")
    each = Case("each", config={}, arguments=USUAL | {"save_on_each_node": True})
    with patch.object(sealing.logger, "warning", lambda _, text: said.append(text)):
        trained(str(out / "each"), case=each)
        trained(str(out / "each"), str(out / "each" / "checkpoint-2"), case=each)
    found["each"] = said, list((out / "each").rglob(MANIFEST))
    return found


def refused(out: Path, ended: Path) -> list[str]:
    """A run of fewer steps than are done, and one whose checkpoints have no states."""
    fewer = Case("fewer", config={}, arguments=USUAL | {"max_steps": 5})
    with pytest.raises(ValueError, match=r"checkpoint has 6 steps, .* to have 5: no step can be"):
        trained(str(ended), True, fewer)
    case = Case("weights", config={}, arguments=USUAL | {"save_only_model": True})
    trained(str(out / "weights"), case=case)
    for resume in (True, str(out / "weights" / "checkpoint-2")):
        with pytest.raises(ValueError, match=r"checkpoint-. has weights alone .*from_pretrained"):
            trained(str(out / "weights"), resume, case)
    return sorted(path.name for path in (out / "weights").glob("checkpoint-*"))


def test_stock_checkpoints_are_taken_and_old_ones_go_last(tmp_path: Path) -> None:
    (found,) = run_launched(alone, 1, str(tmp_path))
    assert found["error"] < 1e-5
    assert found["same"]
    assert found["ended"], "a run that goes on from its last step made another one"
    by_name, going, newest = found["said"]
    place = tmp_path / "ours" / "checkpoint-4"
    assert by_name.startswith(f"{place} has no manifest, as those of other trainers and older")
    assert newest == by_name
    assert going == "resume_from_checkpoint=True: going on from " + by_name.split(" ", 1)[0]
    pairs = [["checkpoint-2"], ["checkpoint-2", "checkpoint-4"], ["checkpoint-4", "checkpoint-6"]]
    assert found["at sealing"][:3] == pairs
    assert found["in the end"] == ["checkpoint-6"]
    assert found["killed"] == ["checkpoint-2", "checkpoint-4"]
    assert found["weights"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    said, manifests = found["each"]
    assert not manifests
    assert sum("checkpoints get no manifest" in text for text in said) == 2  # once for each run
    assert sum("has no manifest" in text for text in said) == 1


@pytest.fixture
def best(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 99)
    seal(folder)
    return folder


def test_a_whole_best_is_loaded_also_from_a_folder_that_was_moved(best: Path) -> None:
    for named in (str(best), "/where/it/was/checkpoint-2"):
        trainer = Trained(best.parent, named)
        trainer._load_best_model()
        assert trainer.loaded == str(best)
    nothing = Trained(best.parent, None)
    nothing._load_best_model()
    assert nothing.loaded is None


def test_a_damaged_or_missing_best_is_refused(best: Path) -> None:
    flipped(best / "model.safetensors")
    trainer = Trained(best.parent, str(best))
    with pytest.raises(ValueError, match=r"checkpoint-2, the best.*model\.safetensors.*--resume"):
        trainer._load_best_model()
    best.rename(best.with_name("checkpoint-2.damaged"))
    with pytest.raises(ValueError, match=r"the best checkpoint.*the folder is missing"):
        trainer._load_best_model()
    assert trainer.loaded is None


def test_what_was_begun_and_has_no_manifest_is_not_whole(best: Path) -> None:
    (best / MANIFEST).unlink()
    (best / "trainer_state.json").write_text("{}")
    trainer = Trained(best.parent, str(best))
    trainer._load_best_model()  # of a version without manifests
    for text in (json.dumps({"gets_manifest": True}), '{"vers'):
        (best / RECORD).write_text(text)
        with pytest.raises(ValueError, match="it was not saved to the end"):
            trainer._load_best_model()


def test_a_checkpoint_is_uploaded_when_it_is_whole(best: Path) -> None:
    """Also one that is saved from a callback, as transformers does on SIGTERM."""
    trainer = Trained(best.parent, None)
    (best / "checkpoint-is-incomplete.txt").touch()
    trainer._save_checkpoint(None, None)
    assert trainer.pushed == ["begins: False", "checkpoint-2: True"]
    (best / "checkpoint-is-incomplete.txt").unlink()
    assert problems_of(best) == []
    trainer._push_from_checkpoint(str(best.parent))  # what is no checkpoint waits for nothing
    assert len(trainer.pushed) == 3


@pytest.mark.parametrize("place", ["_save_checkpoint", "_maybe_log_save_evaluate"])
def test_what_is_saved_after_a_failure_is_no_checkpoint(best: Path, place: str) -> None:
    """Where transformers fails, and where a callback does."""

    class Fails(Stock):
        def _maybe_log_save_evaluate(self) -> None:
            self._save_checkpoint(None, None)
            raise OSError("no space left")

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if place == "_save_checkpoint":
                raise OSError("no space left")

    class Failing(SealedCheckpointsMixin, Fails):
        _watchdog = None
        __init__ = Trained.__init__
        _get_output_dir = Trained._get_output_dir

    trainer: Any = Failing(best.parent, None, save_total_limit=3)
    with pytest.raises(OSError, match="no space left"):
        trainer._maybe_log_save_evaluate()
    assert trainer._saving is None
    assert trainer.args.save_total_limit == 3
    assert not trainer._callbacks_follow
