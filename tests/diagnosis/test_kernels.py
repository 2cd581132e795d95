"""What the rows of `longctx kernels` mean for training, and Liger Kernel beside it."""

from typing import Any

import pytest

from longctx_patch.diagnosis.packages import check_fused_layers, check_kernels
from longctx_patch.hf.layers import fused_layers
from longctx_patch.kernels import installed


def row(name: str, share: float | None, missing: str | None, device: str = "cuda") -> Any:
    install = f"pip install {name}"
    return {
        "name": name,
        "device": device,
        "share_of_best": share,
        "missing": missing,
        "install": install,
    }


EAGER = row("torch_eager", None, None, "any")


def test_a_faster_kernel_that_is_missing_is_a_warning() -> None:
    four = row("flash_attn_4", 1.0, "needs the package flash-attn-4")
    check = check_kernels("cudnn", [four, row("cudnn", 0.89, None), EAGER])
    assert (check.state, check.fix) == ("warning", "pip install flash_attn_4")
    assert check.found == (
        "auto takes cudnn, 89% as fast as flash_attn_4; flash_attn_4 needs the package flash-attn-4"
    )


def test_the_fastest_kernel_is_there() -> None:
    check = check_kernels("cudnn", [row("cudnn", 1.0, None), row("flex", None, "no"), EAGER])
    assert (check.state, check.found) == (
        "ok",
        "auto takes cudnn; these work: cudnn, torch_eager",
    )


def test_without_a_gpu_nothing_is_missing() -> None:
    check = check_kernels("torch_eager", [row("cudnn", 1.0, "needs an NVIDIA GPU"), EAGER])
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
