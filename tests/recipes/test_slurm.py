"""slurm.sh of a run folder starts the folder's recipe on each machine, with Slurm's numbers."""

import os
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

STUBS = {
    "scontrol": "printf 'node7\\nnode8\\n'",
    # Runs what comes after its own options, once, as machine 1.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_NODEID=1 exec "$@"',
    # Slurm sends SIGUSR1 to all processes of a job, of which the launcher must not die.
    "accelerate": 'kill -USR1 $$; printf "%s\\n" "$@"',
}


@pytest.mark.parametrize(
    ("recipe", "flag"), [("finetune", "--settings"), ("sft", "--config"), ("dpo", "--config")]
)
def test_the_recipe_is_that_of_the_folder(recipe: str, flag: str, tmp_path: Path) -> None:
    run, stubs = tmp_path / "a run", tmp_path / "bin"
    run.mkdir()
    stubs.mkdir()
    (run / "accelerate.yaml").write_text("num_machines: 2\n")
    (run / f"{recipe}.yaml").write_text("model: m\n")
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{text}\n")
        (stubs / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41003"}
    slurm |= {"SLURM_CPUS_PER_TASK": "4", "PATH": f"{stubs}:{os.environ['PATH']}"}
    script = str(files("longctx_patch.recipes") / "slurm" / "run_folder.sh")

    def ran(**changes: str) -> "subprocess.CompletedProcess[str]":
        words, env = ["bash", script, str(run), "--max-steps", "10"], os.environ | slurm | changes
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False)

    done, other = ran(), ran(SLURM_NNODES="1")
    assert (done.returncode, other.returncode) == (0, 1)
    assert "is for 2 machines, but the job has 1. Use sbatch --nodes 2" in other.stderr
    words = ["launch", "--config_file", str(run / "accelerate.yaml"), "--rdzv_conf", "timeout=300"]
    words += ["--machine_rank", "1", "--main_process_ip", "node7", "--main_process_port", "11003"]
    words += ["-m", f"longctx_patch.recipes.{recipe}", flag, str(run / f"{recipe}.yaml")]
    assert done.stdout.splitlines() == [*words, "--max-steps", "10"]
