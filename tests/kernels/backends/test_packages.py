"""Kernels that come in packages: found without importing anything, refused with what to type."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

import pytest
import torch

from longctx_patch.kernels import KernelRequest, Score, Segments, available, choose_kernel
from longctx_patch.kernels import installed as machine
from longctx_patch.kernels.base import CAUSAL_WINDOW
from tests.kernels.dense import problem
from tests.kernels.fake_flash_attn_2 import FlashAttn2
from tests.kernels.fake_flash_attn_4 import FlashAttn4
from tests.kernels.fakes import fake_kernels

GPU = KernelRequest("cuda", torch.bfloat16, 128)
Install = Callable[[Mapping[str, str], Mapping[str, object]], None]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Pretend a GPU of this compute capability."""

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))
        choose_kernel.cache_clear()

    yield pretend
    choose_kernel.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend distributions of these versions, and modules."""

    def pretend(versions: Mapping[str, str], modules: Mapping[str, object]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(machine, "version", version)
        for name, content in modules.items():
            module = ModuleType(name)
            for function in dir(content):
                if function.startswith("_flash"):
                    setattr(module, function, getattr(content, function))
            monkeypatch.setitem(sys.modules, name, module)
        choose_kernel.cache_clear()

    return pretend


def reason(name: str, request: KernelRequest = GPU) -> str:
    return available()[name].refuses(request) or "takes it"


def test_without_packages_the_reason_says_what_to_type(
    on_gpu: Callable[[int, int], None], install: Install
) -> None:
    on_gpu(9, 0)
    install({}, {})
    assert 'pip install "flash-attn-4[cu13]==4.0.0b36"' in reason("flash_attn_4")
    assert "build it in the folder hopper" in reason("flash_attn_3")
    assert 'pip install --no-build-isolation "flash-attn>=2.8,<3"' in reason("flash_attn_2")
    assert choose_kernel("auto", GPU).name == "cudnn"


def test_a_module_named_cute_in_flash_attn_2_is_not_flash_attn_4(
    on_gpu: Callable[[int, int], None], install: Install
) -> None:
    """Wheels of flash-attn 2.8 bring an early `flash_attn.cute`."""
    on_gpu(9, 0)
    modules = {"flash_attn.cute.interface": None, "flash_attn.flash_attn_interface": FlashAttn2()}
    install({"flash-attn": "2.8.3"}, modules)
    assert reason("flash_attn_4").startswith("needs the package flash-attn-4")
    assert reason("flash_attn_2") == "takes it"
    assert choose_kernel("auto", GPU._replace(softcap=True)).name == "flash_attn_2"


def test_the_installed_module_is_called(
    on_gpu: Callable[[int, int], None], install: Install
) -> None:
    on_gpu(9, 0)
    install({"flash-attn-4": "4.0.0b36"}, {"flash_attn.cute.interface": FlashAttn4()})
    for request in (GPU, GPU._replace(pieces=True), GPU._replace(softcap=True)):
        assert choose_kernel("auto", request).name == "flash_attn_4"
    given = problem(5, 5, (4, 2), torch.bfloat16)
    segments = Segments((5,), (5,), CAUSAL_WINDOW)
    out, lse = choose_kernel("auto", GPU).forward(*given[:3], segments, Score(0.3))
    assert (out.shape, lse.shape) == (given.q.shape, (2, 4, 5))


def test_an_old_version_is_refused(on_gpu: Callable[[int, int], None], install: Install) -> None:
    on_gpu(9, 0)
    install({"flash-attn-4": "4.0.0b12", "flash-attn": "2.7.4"}, {})
    assert reason("flash_attn_4").startswith(
        "needs flash-attn-4 4.0.0b36 or newer, 4.0.0b12 is installed: pip install"
    )
    assert "needs flash-attn 2.8.0 or newer, 2.7.4 is installed" in reason("flash_attn_2")


def test_what_fails_to_import_is_refused_with_its_error(
    on_gpu: Callable[[int, int], None], install: Install
) -> None:
    on_gpu(9, 0)
    install({"flash-attn-4": "4.0.0b40", "flash-attn": "2.8.3"}, {})
    assert "importing flash_attn.cute.interface fails (ModuleNotFoundError" in reason(
        "flash_attn_4"
    )
    assert choose_kernel("auto", GPU).name == "cudnn"
    with pytest.raises(ValueError, match=r"flash_attn_2: flash-attn 2\.8\.3 is installed, but imp"):
        choose_kernel("flash_attn_2", GPU)


@pytest.mark.parametrize(
    ("capability", "name", "changes", "says"),
    [
        ((8, 0), "flash_attn_4", {}, "needs compute capability 9.0 to 11.x, this GPU has 8.0"),
        ((12, 0), "flash_attn_4", {}, "needs compute capability 9.0 to 11.x, this GPU has 12.0"),
        ((10, 0), "flash_attn_4", {"head_dim": 192}, "up to 128, and 256, on this GPU"),
        ((10, 0), "flash_attn_4", {"softcap": True}, "has hung in backward with a softcap"),
        ((9, 0), "flash_attn_4", {"tiles": True}, "takes no tables"),
        ((9, 0), "flash_attn_4", {"dtype": torch.float32}, "takes bfloat16, float16"),
        ((9, 0), "flash_attn_4", {"head_dim": 264}, "takes head dims up to 256"),
        ((10, 0), "flash_attn_3", {}, "needs compute capability 9.0 to 9.x, this GPU has 10.0"),
        ((9, 0), "flash_attn_3", {"deterministic": True}, "has no deterministic backward"),
        ((9, 0), "cudnn", {"deterministic": True}, "has no deterministic backward"),
        ((7, 5), "torch_flash", {}, "needs compute capability 8.0 or higher, this GPU has 7.5"),
    ],
)
def test_what_a_gpu_or_a_kernel_lacks(
    capability: tuple[int, int],
    name: str,
    changes: dict[str, Any],
    says: str,
    on_gpu: Callable[[int, int], None],
) -> None:
    on_gpu(*capability)
    assert says in reason(name, GPU._replace(**changes))


@pytest.mark.parametrize("head_dim", [8, 16, 40, 48, 72, 80, 104, 112, 144])
def test_head_dims_that_flash_attn_4_has_wrong(
    head_dim: int, on_gpu: Callable[[int, int], None]
) -> None:
    on_gpu(9, 0)
    says = reason("flash_attn_4", GPU._replace(head_dim=head_dim))
    assert f"this one is {head_dim}" in says
    assert "wrong dq" in says


@pytest.mark.parametrize("head_dim", [24, 32, 64, 88, 96, 128, 192, 256])
def test_head_dims_on_hopper(head_dim: int, on_gpu: Callable[[int, int], None]) -> None:
    on_gpu(9, 0)
    for kernel in fake_kernels().values():
        assert kernel.refuses(GPU._replace(head_dim=head_dim)) is None


def test_without_a_gpu_that_is_the_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for name in ("flash_attn_4", "flash_attn_3", "flash_attn_2", "cudnn", "torch_flash"):
        assert reason(name) == "needs an NVIDIA GPU, and torch sees none"


def test_listing_kernels_imports_none_of_their_packages() -> None:
    code = """
import sys
for name in ("flash_attn", "flash_attn_3", "flash_attn_interface", "triton", "packaging"):
    sys.modules[name] = None  # importing it now raises ImportError
import torch
from longctx_patch.kernels import KernelRequest, available, choose_kernel
assert choose_kernel("auto", KernelRequest("cpu", torch.float32, 8)).name == "torch_cpu"
assert "flash_attn_4" in available()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
