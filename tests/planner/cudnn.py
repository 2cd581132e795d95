"""Machines with the rates of cuDNN's kernel, to compare predictions with measurements of it."""

from dataclasses import replace

from longctx_patch.planner.machines import MACHINES, Hardware, KernelRate, KernelRates

# benchmarks/calibrate.py on H100; at the rates that rows of 65,536 tokens reach within a step.
_64 = KernelRates(
    kernel="cudnn",
    forward_full=KernelRate(465e12, 0, 13e-6),
    forward_causal=KernelRate(450e12, 680, 15e-6),
    backward_full=KernelRate(440e12, 150, 33e-6),
    backward_causal=KernelRate(425e12, 1200, 38e-6),
)
_96 = KernelRates(
    kernel="cudnn",
    forward_full=KernelRate(500e12, 0, 14e-6),
    forward_causal=KernelRate(475e12, 480, 19e-6),
    backward_full=KernelRate(435e12, 100, 39e-6),
    backward_causal=KernelRate(430e12, 1200, 45e-6),
)
_256 = MACHINES["h200"].kernels.of(256)
CUDNN = replace(
    _256,
    backward_full=KernelRate(545e12, 100, 41e-6),
    backward_causal=KernelRate(540e12, 800, 50e-6),
    other_head_dims=((64, _64), (96, _96), (256, _256)),
)


def with_kernel(hardware: Hardware, kernel: str) -> Hardware:
    """An H100 or H200 with the rates of another kernel than commands predict by."""
    assert kernel in (hardware.kernels.kernel, "cudnn")
    is_own = kernel == hardware.kernels.kernel
    return hardware if is_own else replace(hardware, kernels=CUDNN)
