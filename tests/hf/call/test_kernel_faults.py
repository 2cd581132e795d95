"""Kernels that would compute wrong gradients on a GPU are refused, with what mends it."""

from typing import Any

import pytest
import torch
from packaging.version import Version

from longctx_patch.hf.call import kernel_faults
from longctx_patch.hf.call.kernel_faults import Installed, check_faults, delta_rule_fault
from longctx_patch.hf.model.transformers_api import recurrent_modules
from tests.hf.tiny import featured_model


def installed(triton: str, fla: str, tilelang: str | None = None) -> Installed:
    return Installed(Version(triton), Version(fla), Version(tilelang) if tilelang else None)


@pytest.mark.parametrize(
    ("capability", "packages", "is_wrong"),
    [
        (9, installed("3.6.0", "0.6.0"), True),  # stops in its first backward
        (9, installed("3.6.0", "0.4.2"), True),  # goes on with wrong gradients
        (9, installed("3.6.0", "0.4.2", "0.1.15"), True),  # which knows no tilelang
        (9, installed("3.7.0", "0.6.0"), True),
        (9, installed("3.7.1", "0.5.1"), True),  # stops, though this Triton is right
        (9, installed("3.6.0", "0.6.0", "0.1.15"), False),
        (9, installed("3.7.1", "0.6.0"), False),
        (9, installed("3.7.1", "0.4.2"), False),
        (9, installed("3.3.1", "0.4.2"), False),
        (8, installed("3.6.0", "0.4.2"), False),
        (10, installed("3.6.0", "0.6.0"), False),
        (9, Installed(Version("3.6.0"), None, None), True),  # of a version that nobody knows
    ],
)
def test_the_delta_rule_on_hopper(capability: int, packages: Installed, is_wrong: bool) -> None:
    reason = delta_rule_fault(capability, packages)
    assert (reason is not None) == is_wrong
    if reason is not None:
        assert f"Triton {packages.triton}" in reason
        assert "pip install 'flash-linear-attention>=0.6' tilelang" in reason


def test_a_model_on_such_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mixers = recurrent_modules(featured_model("qwen3_5_text"))

    def check(capability: int) -> None:
        check_faults(mixers, lambda _: (capability, 0))

    monkeypatch.setattr(Installed, "here", lambda: installed("3.6.0", "0.6.0"))
    check(9)  # on the CPU
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    check(9)  # transformers found no kernel
    monkeypatch.setattr(kernel_faults, "runs_kernel", lambda _: True)
    check(8)
    with pytest.raises(ValueError, match=r"GatedDeltaNet: flash-linear-attention 0\.6\.0 with Tri"):
        check(9)
    other: Any = recurrent_modules(featured_model("bamba"))
    check_faults(other, lambda _: (9, 0))
