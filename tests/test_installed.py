"""The wheel in an empty environment, without the repository: what a user does first."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.built import ROOT, build_wheel
from tests.docs.pages import blocks
from tests.tiny_llama import TINY_LLAMA

Run = Callable[..., str]
HUB = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of an environment with the wheel and what this one has, our sources but."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
    # A plain path: files *.pth of that folder, such as an editable installation's, don't count.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    install = ["install", "-q", "--no-deps", "--no-index", "--ignore-installed"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), *install]
    subprocess.run([*pip, str(build_wheel(folder))], check=True)

    def program(name: str, *arguments: str | Path) -> str:
        done = subprocess.run(
            [python.parent / name, *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    where = program("python", "-c", "import longctx_patch, longctx_patch.cli as cli; print(cli)")
    assert str(site) in where
    return program


def test_doctor_finds_what_is_needed(run: Run) -> None:
    found = json.loads(run("longctx", "doctor", "--json").splitlines()[-1])
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert states["packages"] == "ok"


def test_a_run_folder_trains(run: Run, tmp_path: Path) -> None:
    LlamaConfig(**TINY_LLAMA).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("It is a long story, told twice. " * 40)
    options = ["--seq-len", "64", "--gpus", "1", "--cpu", "--full", "--tokenizer", "bytes"]
    data = ["--data", tmp_path / "text.txt", "--out", tmp_path / "run"]
    run("longctx", "patch", tmp_path / "model" / "config.json", *options, *data)
    run("longctx", "train", tmp_path / "run", "--max-steps", "1")
    (line,) = (tmp_path / "run" / "training" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1


def test_readmes_script_gives_the_loss_of_one_process(run: Run, tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "README.md", "python")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA | {"max_position_embeddings": 128}))
    model.save_pretrained(tmp_path / "model")
    row = torch.arange(100)[None]
    with torch.no_grad():
        alone = model(input_ids=row, labels=row).loss.item()
    file = tmp_path / "script.py"
    assert HUB in script
    file.write_text(script.replace(HUB, str(tmp_path / "model")))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    said = run("python", *launcher, file)
    (loss,) = re.findall(r"^\d\.\d+$", said, re.MULTILINE)
    assert float(loss) == pytest.approx(alone, rel=1e-6)
