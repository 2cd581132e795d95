"""Processes started by `accelerate launch`, as a user does it, against one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from longctx_patch.plugin import accelerate_yaml
from longctx_patch.recipes import finetune
from longctx_patch.recipes.metrics import read_metrics

YAML = Path(__file__).parents[2] / "recipes" / "accelerate" / "cpu_2_processes.yaml"


def launch(folder: Path, *flags: str, yaml: Path = YAML) -> subprocess.CompletedProcess[str]:
    """Run the recipe in gloo processes, in a directory that is not the repository."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(yaml)]
    command += ["--main_process_port", "0", "-m", "longctx_patch.recipes.finetune", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def assert_same(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "tokens", "learning_rate"):
            assert our[name] == pytest.approx(their[name], rel=1e-5), name


@pytest.mark.timeout(200)
def test_two_processes_train_as_one_and_resume(
    config_file: Path, text_file: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(config_file), "--text", str(text_file), "--seq-len", "97"]
    flags += ["--rope", "yarn", "--learning-rate", "1e-2", "--max-steps", "4", "--save-every", "2"]
    flags += ["--gradient-accumulation-steps", "2"]
    finetune.main([*flags, "--output", str(tmp_path / "one")])
    sharded = [*flags, "--ring", "2", "--checkpoint", "attention", "--output", "two"]
    done = launch(tmp_path, *sharded)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("| 0/4 [00:00<?, ?step/s]") == 1  # the progress bar of one process
    whole = read_metrics(tmp_path / "two")
    assert_same(whole, read_metrics(tmp_path / "one"))

    final = tmp_path / "two" / "final"
    set_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(final))
    PeftModel.from_pretrained(base, str(final))

    (tmp_path / "two/checkpoints/step_000004/run.json").unlink()
    done = launch(tmp_path, *sharded, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    for again, before in zip(read_metrics(tmp_path / "two"), whole, strict=True):
        assert (again["loss"], again["grad_norm"]) == (before["loss"], before["grad_norm"])


@pytest.mark.timeout(200)
def test_two_replicas_of_two_ranks_with_documents_of_different_lengths(
    config_file: Path, tmp_path: Path
) -> None:
    """Replicas hold different numbers of tokens, and the shards of short rows may hold none."""
    lengths = (3, 50, 17, 64, 31, 2, 40, 8, 59)
    lines = [json.dumps({"text": chr(97 + n) * length}) for n, length in enumerate(lengths)]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    (tmp_path / "four.yaml").write_text(
        accelerate_yaml(4, 2, fsdp=False, cpu=True, mixed_precision="no")
    )
    flags = ["--model", str(config_file), "--text", str(tmp_path / "documents.jsonl"), "--full"]
    flags += ["--one-document-per-row", "--seq-len", "64", "--max-steps", "4"]
    flags += ["--gradient-accumulation-steps", "2", "--learning-rate", "1e-3"]
    finetune.main([*flags, "--batch-size", "2", "--output", str(tmp_path / "one")])
    done = launch(
        tmp_path, *flags, "--ulysses", "2", "--output", "four", yaml=tmp_path / "four.yaml"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(read_metrics(tmp_path / "four"), read_metrics(tmp_path / "one"))
