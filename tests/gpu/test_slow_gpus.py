"""A GPU that another process occupies is named: by the doctor, at a start, and in a running job.

`python -m tests.gpu.test_slow_gpus GPU` occupies one by hand.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longctx_patch.cli.diagnosis.gpus import read_gpus
from longctx_patch.cli.diagnosis.speeds import check_gpu_speed, check_link_speed, measure_speeds
from longctx_patch.health.pace import EVERY, PaceCheck, probe_of
from tests.harness import run_distributed

pytestmark = pytest.mark.gpu
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more")
START = 30
"""The step in which a GPU gets slow."""


def occupy(gpu: int, ready: Path | None = None) -> None:
    """Compute on a GPU, beside what it does otherwise."""
    torch.cuda.set_device(gpu)
    values = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(values)
    while True:
        for _ in range(20):
            torch.mm(values, values, out=out)
        torch.cuda.synchronize()
        if ready is not None:
            ready.touch()


@contextmanager
def last_gpu_occupied(folder: Path) -> Iterator[None]:
    """Within it two processes compute on the last GPU."""
    places = [folder / f"ready_{number}" for number in range(2)]
    command = [sys.executable, "-m", "tests.gpu.test_slow_gpus", str(torch.cuda.device_count() - 1)]
    processes = [subprocess.Popen([*command, str(place)]) for place in places]
    try:
        while not all(place.exists() for place in places):
            assert not any(process.poll() for process in processes)
            time.sleep(0.1)
        yield
    finally:
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


@TWO
def test_doctor_and_a_start_name_an_occupied_gpu(tmp_path: Path) -> None:
    found = read_gpus()
    ranks = len(found.seen)
    sound = measure_speeds(ranks)
    for check in (check_gpu_speed(found, sound), check_link_speed(found, sound)):
        print(check)
        assert check.state != "failed"
    with last_gpu_occupied(tmp_path):
        check = check_gpu_speed(found, measure_speeds(ranks))
        print(check)
        assert check.state == "failed"
        assert f"GPU {ranks - 1} ({found.seen[-1].name}, " in check.found
        assert found.seen[-1].pci in check.fix
        said = run_distributed(at_start, ranks, backend="nccl")
        print(said[0])
        assert all(each == said[0] for each in said)
        assert f"SLOW GPU: all ranks wait in every step for rank {ranks - 1} on " in said[0][0]


def at_start(rank: int) -> list[str]:
    said = list[str]()
    PaceCheck(torch.device("cuda", rank), said.append)
    return said


def steps(rank: int, slow: int, folder: Path) -> tuple[list[str], int, str]:
    """What is said at the start, and the step and text of the first slow rank."""
    device, said, beside = torch.device("cuda", rank), list[str](), ExitStack()
    started = time.perf_counter()
    pace = PaceCheck(device, said.append)
    print(f"rank {rank}: the start took {time.perf_counter() - started:.2f} s")
    out = torch.empty(8192, 8192, dtype=torch.bfloat16, device=device)
    values = torch.randn_like(out)
    before, step, found = list(said), 0, ""
    with beside:
        while not found and step < START + 4 * EVERY:
            step += 1
            for _ in range(20):
                torch.mm(values, values, out=out)
            dist.all_reduce(out[:1024])
            found = pace.after_step(step)
            torch.cuda.synchronize()  # as a recipe does
            if step == START and rank == slow:
                beside.enter_context(last_gpu_occupied(folder))
    return before, step, found


@TWO
def test_a_running_job_names_a_gpu_that_gets_slow(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    found = run_distributed(steps, ranks, ranks - 1, tmp_path, backend="nccl")
    print(found[0])
    assert all(each == found[0] for each in found)
    before, step, text = found[0]
    assert before == []
    assert START < step <= START + 50
    assert f"SLOW GPU: all ranks wait in every step for rank {ranks - 1} on " in text


if __name__ == "__main__":
    occupy(int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
