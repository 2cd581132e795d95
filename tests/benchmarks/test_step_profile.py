"""step_profile.py: every instant of a step belongs to exactly one part."""

from typing import Any

import pytest
import step_profile
import torch
from step_profile import Activity

from longctx_patch import LongContextConfig, patch
from longctx_patch.loss.linear_head import LinearHead
from tests.hf.tiny import tiny_model

PARTS_OF_KERNELS = {
    "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention backward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention forward",
    "kernel_cutlass_flash_bwd_preprocessFlashAttentionBackwardPreprocess": "attention backward",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT": "linear",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>": "linear",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "linear",
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d": "loss",
    "void cunn_SoftMaxForward<8, c10::BFloat16, float>": "loss",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "exposed communication",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "FSDP",
    "void at::native::chunk_cat_cuda_kernel<float>": "FSDP",
    "void at::native::vectorized_elementwise_kernel<4>": "elementwise",
    "Memcpy PtoP (Device -> Device)": "exposed communication",
}


@pytest.mark.parametrize(("kernel", "part"), PARTS_OF_KERNELS.items())
def test_part_of_a_kernel(kernel: str, part: str) -> None:
    assert step_profile.part_of(Activity(kernel, 0.0, 1.0)) == part


def test_ranges_say_what_names_do_not() -> None:
    gemm, send = "nvjet_tst", "ncclDevKernel_SendRecv"
    assert step_profile.part_of(Activity(gemm, 0, 1, ("loss",))) == "loss"
    assert step_profile.part_of(Activity(gemm, 0, 1, ("lossless thing",))) == "linear"
    assert step_profile.part_of(Activity("add", 0, 1, ("Optimizer.step#AdamW.step",))) == (
        "optimizer"
    )
    assert step_profile.part_of(Activity(send, 0, 1, ("FSDP::all_gather",))) == "FSDP"
    for name in ("copy", "multi_tensor_apply_kernel<Copy>"):
        gathers = Activity(name, 0, 1, ("FSDP::all_gather_copy_in",))
        assert step_profile.part_of(gathers) == "FSDP"


def test_every_instant_of_a_step_has_one_part() -> None:
    """Communication counts only where nothing computes; time outside the step doesn't count."""
    activities = [
        Activity("flash_fwd", -5, 10),  # begins before the step
        Activity("ncclDevKernel_SendRecv", 5, 30),  # exposed 10 to 20 and 25 to 28
        Activity("nvjet", 20, 25),
        Activity("ncclDevKernel_AllGather", 28, 34),  # FSDP takes precedence: 28 to 34
        Activity("flash_bwd", 40, 60),
        Activity("vectorized_elementwise", 50, 65),  # 60 to 65 alone
        Activity("cross_entropy", 90, 120),  # ends after the step
    ]
    parts = step_profile.microseconds_by_part(activities, 0, 100)
    assert {part: value for part, value in parts.items() if value} == {
        "attention forward": 10,
        "exposed communication": 10 + 3,
        "linear": 5,
        "FSDP": 6,
        "attention backward": 20,
        "elementwise": 5,
        "loss": 10,
        "idle": 6 + 25,
    }
    assert sum(parts.values()) == 100


def test_the_longest_gaps_of_a_step() -> None:
    ran = [Activity("b", 4, 9), Activity("a", 1, 8), Activity("c", 8, 9), Activity("d", 12, 14)]
    found = step_profile.gaps(ran, 0, 15, count=2)
    assert [(row["before"], row["after"], row["milliseconds"]) for row in found] == [
        ("b", "d", 3e-3),
        ("the step's start", "a", 1e-3),
    ]


def test_a_profiled_step_computes_its_loss_in_chunks() -> None:
    """The profile once gave the head a forward of its own, and measured full logits."""
    model = tiny_model()
    patch(model, LongContextConfig())
    ids = torch.arange(8)[None]
    with step_profile.named_loss(), torch.profiler.profile() as profile:
        out = model(input_ids=ids, labels=ids)
    assert out.logits is None
    assert sum(event.name == "loss" for event in profile.events()) == 1
    assert LinearHead.walk.__name__ == "walk"


def test_a_trace_of_the_profiler() -> None:
    def event(name: str, category: str, start: float, duration: float, stream: int) -> Any:
        place = {"pid": 0, "tid": stream, "ts": start, "dur": duration}
        return {"ph": "X", "name": name, "cat": category, **place}

    trace = {
        "traceEvents": [
            event("gemm", "kernel", 12, 3, 7),
            event("loss", "gpu_user_annotation", 10, 6, 7),
            event("after", "kernel", 17, 1, 7),
            event("elsewhere", "kernel", 12, 3, 8),
            event("aten::mm", "cpu_op", 1, 2, 99),
            event(step_profile.STEP, "user_annotation", 2, 20, 99),
            event(step_profile.STEP, "gpu_user_annotation", 3, 18, 7),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found, start, stop = step_profile.activities_of(trace)
    assert (start, stop) == (2, 22)
    assert {activity.name: activity.ranges for activity in found} == {
        "gemm": (step_profile.STEP, "loss"),
        "after": (step_profile.STEP,),
        "elsewhere": (),
    }
