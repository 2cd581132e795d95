"""Kernels of recurrent layers on a GPU: they must run, unless torch's functions are asked for, and
take a model's sizes."""

import copy
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from longctx_patch import LongContextConfig, patch
from longctx_patch.hf.call import kernel_faults
from longctx_patch.hf.call.kernel_faults import Installed, check_faults, delta_rule_fault
from longctx_patch.hf.call.mixer_kernels import LIMITS
from longctx_patch.hf.call.mixers import check_mixers
from longctx_patch.hf.model import sequence_kernels, transformers_api
from longctx_patch.hf.model.sequence_kernels import (
    KERNELS,
    functions_of,
    lacks_convolution,
    runs_kernel,
)
from longctx_patch.hf.model.transformers_api import recurrent_modules
from tests.hf.call.test_mixers import CHAINED, LENGTH, assert_exact, install
from tests.hf.float64 import in_float64, stock_step, whole_row
from tests.hf.tiny import featured_model

TORCH = LongContextConfig(torch_recurrence=True)
SIZED = {
    "qwen3_5_text": (
        {"linear_key_head_dim": 264},
        "Qwen3_5GatedDeltaNet with 264 numbers of a key head: the kernels of "
        "flash-linear-attention take up to 256",
    ),
    "kimi_linear": (
        {"linear_head_dim": 258},
        "KimiLinearDeltaAttention with 258 numbers of a key head: the kernels of flash-linear",
    ),
    "bamba": (
        {"mamba_d_conv": 5},
        "BambaMixer with 5 tokens of a convolution: the kernels of causal-conv1d take 2 to 4",
    ),
    "granitemoehybrid": (
        {"mamba_d_state": 13},
        "GraniteMoeHybridMambaLayer with 180 channels of a convolution: the kernels of "
        "causal-conv1d take multiples of 8",
    ),
}


def packages(names: Iterable[str] = KERNELS) -> set[str]:
    """Those of these functions of transformers."""
    return {KERNELS[name].module.partition(".")[0] for name in names}


def write_package(folder: Path, package: str) -> None:
    """A package with each kernel that is taken of it."""
    (folder / package).mkdir(exist_ok=True)
    (folder / package / "__init__.py").write_text("")
    for kernel in KERNELS.values():
        first, *rest = kernel.module.split(".")
        if first == package:
            path = folder / package
            for part in rest:
                path /= part
                path.mkdir(exist_ok=True)
                (path / "__init__.py").touch()
            with (path / "__init__.py").open("a") as file:
                file.write(f"def {kernel.name}(*args, **options): ...\n")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator["Gpu"]:
    yield Gpu(monkeypatch, tmp_path)
    for package in packages():  # transformers would take them for a model that it imports later
        forget(package)


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


class Gpu:
    """Parameters say that they are on one, and packages are installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self._folder = monkeypatch, folder
        monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
        monkeypatch.syspath_prepend(folder)

    def install(self, package: str, broken: str | None = None) -> None:
        """A package with each kernel that is taken of it, or one that raises on import."""
        forget(package)
        importlib.invalidate_caches()
        write_package(self._folder, package)
        if broken:
            (self._folder / package / "__init__.py").write_text(broken)

    def import_anew(self, model: Any) -> None:
        """Decide between kernels and torch again, as importing transformers does."""
        for mixer in transformers_api.recurrent_modules(model):
            namespace = transformers_api.code_of(type(mixer)).__globals__
            for name, function in functions_of(mixer).items():
                kernel = KERNELS[name]
                decide = use_kernel_func_from_hub_with_fallback(
                    kernel.name, kernel.module.partition(".")[0]
                )
                function = decide(sequence_kernels.torch_function(function))
                self._monkeypatch.setitem(namespace, name, function)


@pytest.mark.parametrize("family", CHAINED)
def test_torch_functions_are_known_from_kernels(family: str, gpu: Gpu) -> None:
    """By what transformers has decided, for each function of each family."""
    model = featured_model(family)
    functions = [
        (name, mixer)
        for mixer in transformers_api.recurrent_modules(model)
        for name in functions_of(mixer)
    ]
    assert {name for name, _ in functions} >= {"causal_conv1d_fn"}
    assert not any(runs_kernel(functions_of(mixer)[name]) for name, mixer in functions)
    for package in packages(name for name, _ in functions):
        gpu.install(package)
    gpu.import_anew(model)
    for name, mixer in functions:
        kernel = sequence_kernels.chosen(functions_of(mixer)[name])
        assert (kernel.__module__, kernel.__name__) == (KERNELS[name].module, KERNELS[name].name)
    check_mixers(model, LongContextConfig(), None)
    for name, mixer in functions:
        for limit in LIMITS.get(name, ()):
            assert limit.of(mixer) in limit.takes


MISSING = {
    "qwen3_5_text": r"causal-conv1d for causal_conv1d_fn, flash-linear-attention for "
    r"torch_chunk_gated_delta_rule\. Either pip install causal-conv1d flash-linear-attention \(",
    "kimi_linear": "flash-linear-attention for chunk_kimi_delta_attention",
    "bamba": r"causal-conv1d for causal_conv1d_fn, mamba-ssm for mamba2_chunk_scan\. Either",
    "lfm2": r"kernels: causal-conv1d for causal_conv1d_fn\. Either",
}


@pytest.mark.parametrize("family", [family for family in MISSING if family in CHAINED])
def test_packages_that_are_missing_are_named(family: str, gpu: Gpu) -> None:
    model = featured_model(family)
    with pytest.raises(ValueError, match=MISSING[family]):
        patch(model, LongContextConfig())
    check_mixers(model, TORCH, None)


@pytest.mark.parametrize("package", sorted(packages()))
def test_packages_that_can_not_be_imported_are_refused_with_their_error(
    package: str, gpu: Gpu
) -> None:
    """transformers runs its torch function in silence then."""
    family = "bamba" if package == "mamba_ssm" else "kimi_linear"
    if family not in CHAINED:
        family = "qwen3_5_text"
    model = featured_model(family)
    for other in packages():
        gpu.install(other, "raise OSError('undefined symbol: _ZN3c10')" * (other == package))
    gpu.import_anew(model)
    with pytest.raises(
        ValueError,
        match=r"installed, but importing \S+ raises OSError\('undefined symbol: _ZN3c10'\)",
    ):
        patch(model, LongContextConfig())
    check_mixers(model, TORCH, None)
    gpu.install(package)
    with pytest.raises(ValueError, match="can be imported now, but could not when transformers"):
        patch(model, LongContextConfig())
    gpu.import_anew(model)
    check_mixers(model, LongContextConfig(), None)


@pytest.mark.parametrize("family", [family for family in SIZED if family in CHAINED])
def test_sizes_that_kernels_do_not_take_are_refused(family: str, gpu: Gpu) -> None:
    """Torch's functions take any size."""
    sizes, says = SIZED[family]
    model: Any = featured_model(family, **sizes)
    check_mixers(model, TORCH, None)
    for config in (TORCH, LongContextConfig()):
        for package in packages():
            gpu.install(package)
        gpu.import_anew(model)
        with pytest.raises(ValueError, match=f"{says}.*pip uninstall "):
            patch(model, config)


def no_convolution(*args: Any, **options: Any) -> Any:
    raise TypeError("'NoneType' object is not callable")


@pytest.mark.parametrize("family", CHAINED)
def test_one_rank_trains_where_fused_kernels_lack_the_convolution_s(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mamba-ssm does without causal-conv1d in its scan alone."""
    model, name = in_float64(family), "mamba2_split_conv1d_scan_combined"
    mixers = transformers_api.recurrent_modules(model)
    namespaces = [transformers_api.code_of(type(mixer)).__globals__ for mixer in mixers]
    if not all(name in namespace for namespace in namespaces):
        assert not any(map(lacks_convolution, mixers))
        return
    wanted = stock_step(copy.deepcopy(model), (LENGTH,))
    for namespace in namespaces:
        monkeypatch.setitem(namespace, name, install(namespace[name], no_convolution))
    with pytest.raises(TypeError, match="NoneType"):
        model.train()(**whole_row((LENGTH,)), use_cache=False)
    assert_exact(model, LongContextConfig(), (LENGTH,), wanted)
    handle = patch(model, LongContextConfig())
    with pytest.raises(ValueError, match="needs causal-conv1d, which it could not import"):
        model(**whole_row((LENGTH,)), use_cache=False, output_hidden_states=True)
    model.eval()(**whole_row((LENGTH,)), use_cache=False)
    handle.unpatch()


def test_versions_of_causal_conv1d_that_mamba_ssm_can_t_use_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers runs its kernel then, and mamba-ssm's has None."""
    mixer = transformers_api.recurrent_modules(featured_model("bamba"))[0]
    namespace = transformers_api.code_of(type(mixer)).__globals__
    names = ("mamba2_split_conv1d_scan_combined", "causal_conv1d_fn")
    with monkeypatch.context() as patched:
        for name in names:
            decide = use_kernel_func_from_hub_with_fallback(name, __name__)
            kernel = decide(sequence_kernels.torch_function(namespace[name]))
            patched.setitem(namespace, name, kernel)
        assert not lacks_convolution(mixer)
        module = sys.modules[__name__]
        patched.setattr(module, "causal_conv1d_fwd_function", None, raising=False)
        assert lacks_convolution(mixer)


causal_conv1d_fn = mamba2_split_conv1d_scan_combined = no_convolution
"""As packages have them."""


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
