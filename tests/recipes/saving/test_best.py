"""The best checkpoint of a trainer is checked before it becomes the final model."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from longctx_patch.checkpoints.manifest import seal
from longctx_patch.recipes.trl_saving import CheckedBest


class Loads:
    """The part of transformers' Trainer that loads the best model."""

    loaded: str | None = None

    def _load_best_model(self) -> None:
        self.loaded = self.state.best_model_checkpoint  # type: ignore[attr-defined]


class Trained(CheckedBest, Loads):
    def __init__(self, output: Path, best: str | None) -> None:
        self.args = SimpleNamespace(output_dir=str(output))
        self.state = SimpleNamespace(best_model_checkpoint=best)


@pytest.fixture
def best(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 99)
    seal(folder)
    return folder


def test_a_whole_one_is_loaded_also_from_a_folder_that_was_moved(best: Path) -> None:
    for named in (str(best), "/where/it/was/checkpoint-2"):
        trained = Trained(best.parent, named)
        trained._load_best_model()
        assert trained.loaded == str(best)
    nothing = Trained(best.parent, None)
    nothing._load_best_model()
    assert nothing.loaded is None


def test_a_damaged_or_missing_one_is_refused(best: Path) -> None:
    weights = best / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"z")
    trained = Trained(best.parent, str(best))
    with pytest.raises(ValueError, match=r"checkpoint-2, the best.*model\.safetensors.*--resume"):
        trained._load_best_model()
    best.rename(best.with_name("checkpoint-2.damaged"))
    with pytest.raises(ValueError, match=r"the best checkpoint.*manifest\.json is missing"):
        trained._load_best_model()
    assert trained.loaded is None
