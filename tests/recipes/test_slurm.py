"""slurm.sh of a run folder starts the folder's recipe on each machine, with Slurm's numbers.

That of examples/ writes the folder first.
"""

import os
import re
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from longctx_patch.cli.main import main as longctx

RUN_FOLDER = str(files("longctx_patch.recipes") / "slurm" / "run_folder.sh")
EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm.sh"
STUBS = {
    "scontrol": "printf 'node7\\nnode8\\n'",
    # Runs what comes after its own options, once, as machine 1.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_NODEID=1 exec "$@"',
    # Slurm sends SIGUSR1 to all processes of a job, of which the launcher must not die.
    "accelerate": 'kill -USR1 $$; printf "%s\\n" "$@"',
    "longctx": 'printf "%s\\n" "$@"; exit 7',
}
JOB = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41003"}
JOB |= {"SLURM_CPUS_PER_TASK": "4"}


def run_script(tmp_path: Path, *words: str, **changes: str) -> "subprocess.CompletedProcess[str]":
    """A script's end under stand-ins for Slurm and what it starts."""
    stubs = tmp_path / "bin"
    stubs.mkdir(exist_ok=True)
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{text}\n")
        (stubs / name).chmod(0o755)
    env = os.environ | JOB | {"PATH": f"{stubs}:{os.environ['PATH']}"} | changes
    return subprocess.run(["bash", *words], env=env, capture_output=True, text=True, check=False)


def launch_words(run: Path, recipe: str, flag: str) -> list[str]:
    words = ["launch", "--config_file", str(run / "accelerate.yaml"), "--rdzv_conf", "timeout=300"]
    words += ["--machine_rank", "1", "--main_process_ip", "node7", "--main_process_port", "11003"]
    return [*words, "-m", f"longctx_patch.recipes.{recipe}", flag, str(run / f"{recipe}.yaml")]


@pytest.mark.parametrize(
    ("recipe", "flag"), [("finetune", "--settings"), ("sft", "--config"), ("dpo", "--config")]
)
def test_the_recipe_is_that_of_the_folder(recipe: str, flag: str, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    (run / "accelerate.yaml").write_text("num_machines: 2\n")
    (run / f"{recipe}.yaml").write_text("model: m\n")
    words = [RUN_FOLDER, str(run), "--max-steps", "10"]
    done = run_script(tmp_path, *words)
    other = run_script(tmp_path, *words, SLURM_NNODES="1")
    assert (done.returncode, other.returncode) == (0, 1)
    assert "is for 2 machines, but the job has 1. Use sbatch --nodes 2" in other.stderr
    assert done.stdout.splitlines() == [*launch_words(run, recipe, flag), "--max-steps", "10"]


def test_the_example_writes_a_folder_for_its_job_and_starts_it(
    config_file: Path, text_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    names = {"MODEL": str(config_file), "DATA": str(text_file), "RUN": str(run)}
    asked = run_script(tmp_path, str(EXAMPLE), **names)
    assert asked.returncode == 7
    done = CliRunner().invoke(longctx, asked.stdout.splitlines())
    assert done.exit_code == 0, done.output
    job = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", EXAMPLE.read_text(), re.MULTILINE))
    folder = yaml.safe_load((run / "accelerate.yaml").read_text())
    assert folder["num_machines"] == int(job["nodes"])
    assert folder["num_processes"] == int(job["nodes"]) * int(job["gpus-per-node"])
    started = run_script(tmp_path, str(EXAMPLE), **names)
    settings = ["--max-steps", "1000", "--resume", "auto"]
    assert started.stdout.splitlines() == [*launch_words(run, "finetune", "--settings"), *settings]
