"""What torch's allocator reports of a GPU, and how `auto` uses it."""

import os
import subprocess
import sys

import pytest
import torch

from longctx_patch.memory.allocator import SETTING, VARIABLES, let_segments_grow
from longctx_patch.memory.limits import MARGIN
from longctx_patch.memory.meter import CudaMeter, meter_of
from tests.hf.tiny import tiny_model
from tests.memory.trained import Trained, assert_equal

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_cpu_has_no_meter() -> None:
    assert meter_of(torch.device("cpu")) is None


def test_segments_grow_unless_the_allocator_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    let_segments_grow()
    assert os.environ.pop("PYTORCH_ALLOC_CONF") == SETTING
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    let_segments_grow()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    let_segments_grow()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_of_segments_that_do_not_grow_less_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(CudaMeter, "capacity", lambda _: 1000)
    for grows, fillable in ((True, 1000), (False, 400 + 420)):
        segments = [{"is_expandable": False}, {"is_expandable": grows}]
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda s=segments, **_: s)
        meter = meter_of(device)
        assert meter is not None
        assert (meter.capacity(), meter.fillable(400)) == (1000, fillable)


@pytest.mark.gpu
@needs_gpu
def test_the_allocator_takes_the_setting() -> None:
    """In a new process, before CUDA starts, `let_segments_grow` has effect."""
    script = (
        "import torch\n"
        "from longctx_patch.memory.allocator import let_segments_grow\n"
        "from longctx_patch.memory.meter import meter_of\n"
        "let_segments_grow()\n"
        "kept = torch.empty(2**28, device='cuda')\n"
        "assert meter_of(kept.device).fill == 1.0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.gpu
@needs_gpu
def test_retries_are_counted() -> None:
    meter = CudaMeter(torch.device("cuda", 0))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        before = meter.retries()
        room = meter.capacity() - meter.allocated()
        half = torch.empty(room * 5 // 8, dtype=torch.uint8, device="cuda")
        del half
        # The allocator has to free its cache to make room.
        whole = torch.empty(room * 7 // 8, dtype=torch.uint8, device="cuda")
        assert meter.allocated() >= whole.nbytes
        assert meter.retries() == before + 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@needs_gpu
def test_bytes_are_those_of_tensors() -> None:
    meter = meter_of(torch.device("cuda", 0))
    assert meter is not None
    before = meter.allocated()
    big = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    assert meter.allocated() - before == big.nbytes
    capacity = meter.capacity()
    del big
    assert meter.allocated() == before
    assert meter.peak() >= before + 2**26
    meter.reset_peak()
    assert meter.peak() == before
    # Memory in the allocator's cache still counts as this process's.
    assert abs(meter.capacity() - capacity) < 2**25
    assert capacity <= torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        assert meter.capacity() <= torch.cuda.get_device_properties(0).total_memory // 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@needs_gpu
def test_auto_offloads_the_first_layers_where_attention_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first layers are offloaded, and gradients are bitwise those of `attention`."""
    length, layers = 2**16, 8  # long enough for compute to hide the copies
    grads = {}
    for checkpoint in ("attention", "auto"):
        model = tiny_model(
            num_hidden_layers=layers,
            hidden_size=1024,
            intermediate_size=1024,
            num_attention_heads=8,
            max_position_embeddings=length,
        ).to("cuda", torch.bfloat16)
        it = Trained(model, length=length, rows=1, checkpoint=checkpoint, deterministic=True)
        for number in range(5):
            grads[checkpoint] = it.step()
            use = it.handle.checkpointing.memory
            if number == 0 and use is not None:
                extra = use.extra_bytes[0]
                # The recompute of the last layer holds the same bytes as its higher rung.
                less = use.peak_bytes - layers // 2 * extra.attention
                monkeypatch.setattr(CudaMeter, "capacity", lambda _, c=less: int(c / (1 - MARGIN)))
        found = it.handle.checkpointing
    assert_equal(grads["auto"], grads["attention"])
    count = found.policies.count("offload")
    assert 2 <= count <= layers - 2
    assert found.policies == ("offload",) * count + ("attention",) * (layers - count)
    assert found.memory is not None
    assert found.memory.peak_bytes <= found.memory.capacity_bytes
