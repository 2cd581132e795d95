"""What a trainer notes of a run needs no installed package of ours."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from longctx_patch import LongContextConfig, patch
from longctx_patch.rules import versions
from longctx_patch.trainer import record
from tests.hf.tiny import tiny_model


def test_a_copy_that_is_not_installed_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if name == "longctx-patch":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(versions, "version", found)
    versions.installed_version.cache_clear()
    noted = record.record_of(patch(tiny_model(), LongContextConfig()), 1)["versions"]
    versions.installed_version.cache_clear()
    assert noted["longctx-patch"] == "not installed"
    assert noted["torch"] == version("torch")


def test_attention_in_other_groups_is_refused(tmp_path: Path) -> None:
    handle = patch(tiny_model(), LongContextConfig())
    now = record.record_of(handle, 1)
    grouped = now | {"config": now["config"] | {"shifted_group": 32}}
    record.write_record(tmp_path, grouped)
    assert not [*record.resume_problems(tmp_path, grouped)]
    (problem,) = record.resume_problems(tmp_path, now)
    assert "was trained with shifted_group=32, and this run has 0" in problem


@pytest.mark.parametrize("is_fsdp", [False, True])
def test_a_checkpoint_of_the_other_way_to_hold_weights_is_refused(
    tmp_path: Path, is_fsdp: bool
) -> None:
    """transformers ended in a ValueError without a fix, or in torch's CheckpointException."""
    (tmp_path / ("pytorch_model_fsdp_0" if is_fsdp else "model.safetensors")).mkdir()
    assert not [*record.format_problems(tmp_path, is_fsdp=is_fsdp)]
    (problem,) = record.format_problems(tmp_path, is_fsdp=not is_fsdp)
    then, now = ("FSDP", "DDP or one process") if is_fsdp else ("DDP or one process", "FSDP")
    assert f"under {then}, and this run is under {now}" in problem
    assert ("a model loaded from" in problem) != is_fsdp
