"""`longctx kernels` lists kernels, what was measured of them, and what is missing."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from longctx_patch.cli import kernels as command
from longctx_patch.kernels import available
from longctx_patch.kernels.select.probe import Measured, allowed_pairs
from tests.cli.conftest import Run


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lacks)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Pretend a GPU with measured kernels; the list says which commands measured anew."""
    asked: list[bool] = []

    def measured(request: Any, *, anew: bool) -> Mapping[str, Measured]:
        asked.append(anew)
        return {
            "cudnn": Measured({"causal": (1e-3, 2e-3), "full": (2e-3, 4e-3)}),
            "torch_flash": Measured({"causal": (2e-3, 4e-3), "full": (4e-3, 8e-3)}),
            "flash_attn_4": Measured({}, "gives wrong numbers (dq of the full block is off by 1)"),
        }

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Testing")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(command, "_measured", measured)
    return asked


def listed(run: Run, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report, and its kernels by name."""
    report = json.loads(run("kernels", "--json", *options).output)
    return report, {kernel["name"]: kernel for kernel in report["kernels"]}


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_says_what_is_missing(run: Run) -> None:
    report, kernels = listed(run)
    assert list(kernels) == list(available())
    assert report["machine"] is None
    assert report["auto"] == "torch_cpu"
    assert {each["tflops"] for each in kernels.values()} == {None}
    needed = "torch sees none; needs the package flash-attn-4: pip install"
    assert needed in kernels["flash_attn_4"]["missing"]
    assert kernels["flex"]["missing"] == "needs an NVIDIA GPU, and torch sees none"
    assert kernels["torch_cpu"]["missing"] is None
    assert kernels["cudnn"]["dtypes"] == ["bfloat16", "float16"]
    assert kernels["cudnn"]["head_dims"] == "to 256, by 8"
    text = run("kernels").output
    assert text.startswith("No NVIDIA GPU here.")
    asked = run("kernels", "--measure")
    assert asked.exit_code == 2
    assert "--measure without a GPU: torch sees none here. Leave --measure out" in asked.output
    assert "kernel='auto' takes torch_cpu here for causal masks in bfloat16." in text


def test_rates_are_measured_where_a_gpu_is(
    run: Run, gpu: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    report, kernels = listed(run)
    assert report["machine"] == "NVIDIA Testing"
    products = 2 * 32 * 128 * allowed_pairs("causal", 8192)
    assert kernels["cudnn"]["tflops"]["causal"] == {
        "forward": pytest.approx(2 * products / 1e-3 / 1e12),
        "backward": pytest.approx(5 * products / 2e-3 / 1e12),
    }
    assert kernels["cudnn"]["share_of_best"] == 1
    assert kernels["torch_flash"]["share_of_best"] == pytest.approx(0.5)
    assert kernels["flash_attn_4"]["tflops"] is None
    listed(run, "--measure")
    assert gpu == [False, True]
    assert listed(run, "--no-measure")[1]["cudnn"]["tflops"] is None
    assert gpu == [False, True]
    monkeypatch.setattr(command, "_missing", lambda record: None)
    problem = listed(run)[1]["flash_attn_4"]["missing"]
    assert problem == "gives wrong numbers (dq of the full block is off by 1)"
    assert f"flash_attn_4: {problem}" in run("kernels").output
