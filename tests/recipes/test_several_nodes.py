"""Jobs over two machines against one process: Slurm and `accelerate launch`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from longctx_patch.cli.main import main as longctx
from longctx_patch.recipes import finetune
from longctx_patch.recipes.metrics import read_metrics
from tests.recipes.conftest import write_documents
from tests.recipes.nodes import Node, run_job, two_nodes

STEPS = ("--max-steps", "3", "--learning-rate", "1e-2", "--one-document-per-row")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with two_nodes(tmp_path_factory.mktemp("nodes")) as found:
        yield found


@pytest.fixture
def text(tmp_path: Path) -> str:
    return str(write_documents(tmp_path, 3, 50, 17, 64, 31, 2, 40, 8, 59))


def run_folder(config_file: Path, text: str, *more: str) -> Path:
    """What `longctx patch` writes for two machines with a CPU process each, which share a row."""
    folder = config_file.parent / "run"
    words = ["patch", str(config_file), "--seq-len", "64", "--gpus", "2", "--nodes", "2", "--cpu"]
    words += ["--full", "--tokenizer", "bytes", "--data", text, "--out", str(folder), *more]
    done = CliRunner().invoke(longctx, words)
    assert done.exit_code == 0, done.output
    return folder


def assert_same_run(ours: Path, theirs: Path) -> None:
    for our, their in zip(read_metrics(ours), read_metrics(theirs), strict=True):
        for name in ("loss", "grad_norm", "tokens", "learning_rate"):
            assert our[name] == pytest.approx(their[name], rel=1e-5), name


def test_a_run_folder_under_slurm_trains_as_one_process(
    config_file: Path, text: str, tmp_path: Path, nodes: list[Node]
) -> None:
    """Its slurm.sh starts `accelerate launch` on each machine; they share each row."""
    folder = run_folder(config_file, text, "--ring", "2")
    code, said = run_job(tmp_path, nodes, folder / "slurm.sh", str(folder), *STEPS)
    assert code == 0, said[-3000:]
    one = str(tmp_path / "one")
    finetune.main(
        ["--settings", str(folder / "finetune.yaml"), *STEPS, "--ring", "1", "--output", one]
    )
    assert_same_run(folder / "training", tmp_path / "one")


def test_a_job_of_another_number_of_machines_is_refused(
    config_file: Path, text: str, tmp_path: Path, nodes: list[Node]
) -> None:
    folder = run_folder(config_file, text)
    code, said = run_job(tmp_path, nodes[:1], folder / "slurm.sh", str(folder))
    assert (code, "is for 2 machines, but the job has 1. Use sbatch --nodes 2" in said) == (1, True)
