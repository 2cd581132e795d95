"""A GPU that another process occupies is named: by the doctor, at a start, and in a running job.

`python -m tests.gpu.test_slow_gpus GPU` occupies one by hand.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longctx_patch.diagnosis.gpus import read_gpus
from longctx_patch.diagnosis.speeds import check_gpu_speed, check_link_speed, measure_speeds
from longctx_patch.health.pace import EVERY, PaceCheck, probe_of
from tests.harness import run_distributed

pytestmark = pytest.mark.gpu
START = 30
"""The step in which a GPU gets slow."""


def occupy(gpu: int, go: Path | None = None) -> None:
    """Compute on a GPU for ever, once the file is there."""
    torch.cuda.set_device(gpu)
    values = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    out = values @ values
    torch.cuda.synchronize()
    if go is not None:
        go.with_suffix(".ready").touch()
    while go is not None and not go.exists():
        time.sleep(0.01)
    while True:
        for _ in range(50):
            torch.mm(values, values, out=out)
        torch.cuda.synchronize()


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """A file; once it is there, two processes occupy the last GPU."""
    file = tmp_path / "go"
    command = [sys.executable, "-m", __name__, str(torch.cuda.device_count() - 1), str(file)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    while not file.with_suffix(".ready").exists():
        assert not any(process.poll() for process in processes)
        time.sleep(0.1)
    yield file
    for process in processes:
        process.kill()
        process.wait()


def test_a_probe_leaves_random_numbers_and_memory_as_they_were() -> None:
    probe = probe_of(torch.device("cuda", 0))
    assert probe is not None
    probe()()  # cuBLAS keeps a workspace
    before, held = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    rate = probe()()
    assert rate > 1e12
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.cuda.memory_allocated() == held


def test_doctor_names_an_occupied_gpu(go: Path) -> None:
    found = read_gpus()
    last = len(found.seen) - 1
    sound = measure_speeds(len(found.seen))
    for check in (check_gpu_speed(found, sound), check_link_speed(found, sound)):
        print(check)
        assert check.state != "failed"
    go.touch()
    time.sleep(1)
    check = check_gpu_speed(found, measure_speeds(len(found.seen)))
    print(check)
    assert check.state == "failed"
    assert f"GPU {last} ({found.seen[last].name}, " in check.found
    assert found.seen[last].pci in check.fix


def steps(rank: int, go: Path) -> tuple[list[str], int, str]:
    """What is said at the start, and the step and text of the first slow rank."""
    device, said = torch.device("cuda", rank), list[str]()
    started = time.perf_counter()
    pace = PaceCheck(device, said.append)
    print(f"rank {rank}: the start took {time.perf_counter() - started:.2f} s")
    at_start, out = list(said), torch.empty(8192, 8192, dtype=torch.bfloat16, device=device)
    values = torch.randn_like(out)
    for step in range(1, START + 4 * EVERY):
        for _ in range(20):
            torch.mm(values, values, out=out)
        dist.all_reduce(out[:1024])
        if step == START and rank == 0:
            go.touch()
        if found := pace.after_step(step):
            print(f"rank {rank}, step {step}: {found}")
            return at_start, step, found
        torch.cuda.synchronize()  # as a recipe does
    return at_start, 0, ""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more")
def test_a_running_job_names_a_gpu_that_gets_slow(go: Path) -> None:
    ranks = torch.cuda.device_count()
    found = run_distributed(steps, ranks, go, backend="nccl")
    assert all(each == found[0] for each in found)
    at_start, step, text = found[0]
    assert at_start == []
    assert START < step <= START + 50
    assert f"SLOW GPU: all ranks wait in every step for rank {ranks - 1} on " in text
    again = run_distributed(steps, ranks, go, backend="nccl")  # it is occupied from the start
    assert f"SLOW GPU: all ranks wait in every step for rank {ranks - 1} on " in again[0][0][0]


if __name__ == "__main__":
    occupy(int(sys.argv[1]), *map(Path, sys.argv[2:]))
