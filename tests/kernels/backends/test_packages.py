"""Kernels of packages are found without imports; a refusal says what to type."""

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longctx_patch.kernels import (
    BackwardInputs,
    KernelRequest,
    Score,
    Segments,
    available,
    choose_kernel,
)
from longctx_patch.kernels import installed as machine
from longctx_patch.kernels.backends import flex
from longctx_patch.kernels.base import CAUSAL_WINDOW
from tests.kernels.dense import problem
from tests.kernels.fakes import (
    Calls,
    fake_kernels,
    flash_attn_2,
    flash_attn_3_ops,
    flash_attn_4,
)

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
    """Wheels of flash-attn 2.8 contain an early `flash_attn.cute`."""
    on_gpu(9, 0)
    modules = {"flash_attn.cute.interface": None, "flash_attn.flash_attn_interface": flash_attn_2()}
    install({"flash-attn": "2.8.3"}, modules)
    assert reason("flash_attn_4").startswith("needs the package flash-attn-4")
    assert reason("flash_attn_2") == "takes it"
    assert choose_kernel("auto", GPU._replace(softcap=True)).name == "flash_attn_2"


def test_auto_takes_the_installed_package(
    on_gpu: Callable[[int, int], None], install: Install
) -> None:
    on_gpu(9, 0)
    install({"flash-attn-4": "4.0.0b36"}, {"flash_attn.cute.interface": flash_attn_4()})
    for request in (GPU, GPU._replace(pieces=True), GPU._replace(softcap=True)):
        assert choose_kernel("auto", request).name == "flash_attn_4"


class Ops(TorchDispatchMode):
    """Names of the torch ops that are called, with the dtype of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(args[0], Tensor):
            self.seen.add((func._schema.name, args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("flash_attn_4", ["_flash_attn_fwd", "_flash_attn_bwd"]),
        ("flash_attn_3", ["fa3.fwd", "fa3.bwd"]),
        ("flash_attn_2", ["_flash_attn_forward", "_flash_attn_backward"]),
    ],
)
def test_a_packaged_kernels_name_leads_to_its_packages_functions(
    name: str, called: list[str], install: Install
) -> None:
    calls = Calls()
    modules = {
        "flash_attn.cute.interface": flash_attn_4(calls),
        "flash_attn.flash_attn_interface": flash_attn_2(calls),
        "flash_attn_3._C": None,
    }
    install({}, modules)
    q, k, v, dout = problem(6, 6, (4, 2), torch.bfloat16)[:4]
    how = Segments((6,), (6,), CAUSAL_WINDOW), Score(0.3)
    with flash_attn_3_ops(calls):
        out, lse = available()[name].forward(q, k, v, *how)
        available()[name].backward(BackwardInputs(dout, q, k, v, out, lse), *how)
    assert calls.names == called
    package: Any = getattr(available()[name], "package", None)
    assert package.distribution.replace("-", "_").removesuffix("_2") in name


@pytest.mark.parametrize(
    ("name", "device", "op", "dtype"),
    [
        ("cudnn", "meta", "aten::_scaled_dot_product_cudnn_attention", torch.bfloat16),
        ("torch_flash", "meta", "aten::_flash_attention", torch.bfloat16),
        ("torch_cpu", "cpu", "aten::_scaled_dot_product_flash_attention_for_cpu", torch.bfloat16),
        ("torch_eager", "cpu", "aten::bmm", torch.float32),
        ("reference", "cpu", "aten::bmm", torch.float64),
    ],
)
def test_another_kernels_name_leads_to_its_op(
    name: str, device: str, op: str, dtype: torch.dtype
) -> None:
    q, k, v, dout = (x.to(device) for x in problem(6, 6, (2, 2), torch.bfloat16)[:4])
    how = Segments((6,), (6,), CAUSAL_WINDOW), Score(0.3)
    with Ops() as forward:
        out, lse = available()[name].forward(q, k, v, *how)
    with Ops() as backward:
        available()[name].backward(BackwardInputs(dout, q, k, v, out, lse), *how)
    for ops, ending in ((forward, "_forward"), (backward, "_backward")):
        assert {(op, dtype), (op + ending, dtype)} & ops.seen, ops.seen


def test_flex_is_torchs_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> Any:
        raise NotImplementedError("FlexAttention was asked for")

    monkeypatch.setattr(flex, "_compiled", compiled)
    with pytest.raises(NotImplementedError, match="FlexAttention"):
        available()["flex"].forward(
            *problem(6, 6, (4, 2), torch.bfloat16)[:3],
            Segments((6,), (6,), CAUSAL_WINDOW),
            Score(1),
        )


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
        ((8, 0), "cudnn", {"head_dim": 128}, "takes it"),
        *(
            (has, "cudnn", {"head_dim": 136}, f"this GPU has {has[0]}.0, for head dims above 128")
            for has in ((8, 0), (10, 0), (12, 0))
        ),
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


def test_head_dims_on_hopper(on_gpu: Callable[[int, int], None]) -> None:
    """Those that round up to an odd multiple of 16 have a wrong dq in flash-attn 4."""
    on_gpu(9, 0)
    for dim in (8, 16, 40, 48, 72, 80, 104, 112, 144):
        says = reason("flash_attn_4", GPU._replace(head_dim=dim))
        assert f"this one is {dim}" in says
        assert "wrong dq" in says
    for kernel, dim in product(fake_kernels().values(), (24, 32, 64, 88, 96, 128, 192, 256)):
        assert kernel.refuses(GPU._replace(head_dim=dim)) is None


def test_without_a_gpu_that_is_the_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for name in ("flash_attn_4", "flash_attn_3", "flash_attn_2", "cudnn", "torch_flash"):
        assert reason(name) == "needs an NVIDIA GPU, and torch sees none"
