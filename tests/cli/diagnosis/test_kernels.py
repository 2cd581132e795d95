"""What the rows of `longctx kernels` mean for training, and Liger Kernel beside it."""

from typing import Any

import pytest

from longctx_patch.cli.diagnosis.packages import check_fused_layers, check_kernels
from longctx_patch.hf.layers import fused_layers
from longctx_patch.kernels import installed


def row(name: str, missing: str | None) -> Any:
    return {"name": name, "missing": missing}


EAGER = row("torch_eager", None)


def test_kernels_that_work_are_listed() -> None:
    check = check_kernels("cudnn", [row("cudnn", None), row("flex", "no"), EAGER])
    assert check.found == "auto takes cudnn; these work: cudnn, torch_eager"


def test_without_a_gpu_nothing_is_missing() -> None:
    check = check_kernels("torch_eager", [row("cudnn", "needs an NVIDIA GPU"), EAGER])
    assert check.state == "ok"
    assert check_fused_layers(0).state == "skipped"


def test_liger_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "runs_triton", lambda: False)
    assert "gcc" in check_fused_layers(1).fix
    monkeypatch.setattr(installed, "runs_triton", lambda: True)
    monkeypatch.setattr(installed.Package, "version", "0.7.0")
    old = check_fused_layers(1)
    assert (old.state, old.fix) == ("warning", fused_layers.LIGER.install)
    monkeypatch.setattr(installed.Package, "version", "0.8.5")
    monkeypatch.setattr(installed.Package, "load", lambda self: None)
    assert check_fused_layers(1).state == "ok"
