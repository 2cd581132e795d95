"""What a trainer notes of a run needs no installed package of ours."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from longctx_patch import LongContextConfig, patch
from longctx_patch.trainer import record
from tests.hf.tiny import tiny_model


def test_a_copy_that_is_not_installed_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if name == "longctx-patch":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(record, "version", found)
    versions = record.record_of(patch(tiny_model(), LongContextConfig()), 1)["versions"]
    assert versions["longctx-patch"] == "not installed"
    assert versions["torch"] == version("torch")
