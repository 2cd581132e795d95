"""Start a script as torchrun does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks import ROOT
from tests.harness import free_port


def run_script(name: str, num_processes: int, out: Path, *arguments: str) -> tuple[Any, str]:
    """(the JSON it wrote, what rank 0 printed), with the environment that torchrun gives."""
    job = {
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--out", str(out), *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_processes)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * num_processes, outputs
    return json.loads(out.read_text()), outputs[0][0] + outputs[0][1]
