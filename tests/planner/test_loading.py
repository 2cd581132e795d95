"""Host memory of loading: what is planned, by hand, and what processes hold that read by rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longctx_patch.families.stored_tensors import BLOCK_BYTES, READERS
from longctx_patch.planner.job import parse_cluster
from longctx_patch.planner.model_shape import shape_of
from longctx_patch.planner.step_memory import LAYER_OBJECTS_BYTES, loading_bytes
from longctx_patch.transport.processes import run_processes
from tests.planner import host_memory
from tests.planner.jobs import candidate, llama_job, llama_shape

import tests.benchmarks  # puts the scripts' folder on the path  # noqa: F401  # isort: skip
from model_shapes import model_config

WEIGHTS = 8_030_261_248
BESIDE_ROWS = READERS * BLOCK_BYTES + 32 * LAYER_OBJECTS_BYTES
"""Bytes of each process."""


def test_by_hand() -> None:
    on_gpu, on_host = candidate(), replace(candidate(), offload_states=True)
    lora, full = (llama_job("4xH200", 2, lora=lora) for lora in (True, False))
    assert loading_bytes(lora, on_gpu) == loading_bytes(full, on_gpu) == 4 * BESIDE_ROWS
    assert loading_bytes(full, on_host) == 4 * WEIGHTS + 4 * BESIDE_ROWS  # float32 under FSDP2
    adapter = 4 * lora.trained_weights
    assert loading_bytes(lora, on_host) == 2 * WEIGHTS + adapter + 4 * BESIDE_ROWS
    two_machines = replace(lora, cluster=parse_cluster("16xH200"))
    assert loading_bytes(two_machines, on_host) == (2 * WEIGHTS + adapter) / 2 + 8 * BESIDE_ROWS
    whole = llama_job("4xH200", 2, lora=True, fsdp=False)
    assert loading_bytes(whole, on_gpu) == 4 * 2 * WEIGHTS
    assert loading_bytes(replace(whole, dtype="nf4"), on_gpu) == 0
    assert llama_shape().num_weights == WEIGHTS


@pytest.mark.parametrize(("kept", "dtype"), [("host", "float32"), ("nowhere", "bfloat16")])
def test_two_processes_hold_what_is_planned(kept: str, dtype: str, tmp_path: Path) -> None:
    """Memory that the system counts, of a checkpoint of 0.4 GB: rows converted to float32 that stay
    on the host (as trained weights do under FSDP2), and rows that leave through the buffers."""
    config = model_config("llama-8b-32k", 1, num_tokens=64)
    folders = [tmp_path / "small", tmp_path / "large"]
    host_memory.write_holes(folders[0], model_config("tiny", None, num_tokens=2))
    stored = host_memory.write_holes(folders[1], config)
    shape = shape_of(config, "llama")
    assert stored == 2 * shape.num_weights
    given = (*map(str, folders), getattr(torch, dtype), kept == "nowhere")
    found = run_processes(host_memory.read, 2, *given, timeout_s=200)[0]
    job = replace(llama_job("2xH200", 2), shape=shape)
    planned = loading_bytes(job, replace(candidate(1), offload_states=kept == "host"))
    if kept == "host":
        assert found == pytest.approx(planned, rel=0.1)
    else:  # samples may miss the moment at which all readers are busy
        assert 0 < found <= 1.1 * planned
