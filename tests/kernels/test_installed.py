"""The check for a Triton that runs on this machine."""

import sys
from pathlib import Path

import pytest
import torch

from longctx_patch.kernels import installed as machine
from longctx_patch.kernels.installed import runs_triton


def test_no_triton_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "lacks_gpu", lambda least: "torch sees none")
    assert runs_triton.__wrapped__() is False


def test_a_triton_that_does_not_run_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: wrong GLIBC')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(machine, "lacks_gpu", lambda least: None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.warns(UserWarning, match=r"wrong GLIBC.*install a C compiler"):
        assert runs_triton.__wrapped__() is False
