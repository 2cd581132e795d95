"""A job over two machines against one process: Slurm and `accelerate launch`."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from longctx_patch.cli.main import main as longctx
from longctx_patch.recipes import finetune
from longctx_patch.recipes.metrics import read_metrics
from tests.recipes.conftest import flags_of, write_documents
from tests.recipes.nodes import run_job, two_nodes

STEPS = [*flags_of(max_steps=3, learning_rate=1e-2), "--one-document-per-row"]


def test_a_run_folder_under_slurm_trains_as_one_process(config_file: Path, tmp_path: Path) -> None:
    """Its slurm.sh starts `accelerate launch` on each machine, with a CPU process that shares each
    row with the other's."""
    folder, text = tmp_path / "run", write_documents(tmp_path, 3, 50, 17, 64, 31, 2, 40, 8, 59)
    words = ["patch", str(config_file), "--full", "--cpu", *flags_of(seq_len=64, gpus=2, nodes=2)]
    words += flags_of(tokenizer="bytes", data=text, out=folder, ring=2)
    done = CliRunner().invoke(longctx, words)
    assert done.exit_code == 0, done.output
    with two_nodes(tmp_path) as nodes:
        code, said = run_job(tmp_path, nodes, folder / "slurm.sh", str(folder), *STEPS)
    assert code == 0, said[-3000:]
    one = flags_of(settings=folder / "finetune.yaml", ring=1, output=tmp_path / "one")
    finetune.main([*one, *STEPS])
    found, wanted = (read_metrics(output) for output in (folder / "training", tmp_path / "one"))
    for our, their in zip(found, wanted, strict=True):
        for name in ("loss", "grad_norm", "tokens", "learning_rate"):
            assert our[name] == pytest.approx(their[name], rel=1e-5), name
