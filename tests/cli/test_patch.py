"""`longctx patch`, then exactly the commands in the README that it writes."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from longctx_patch.recipes import finetune
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.settings import parse_settings
from tests.cli.conftest import Run
from tests.hf.seeing import seeing_model
from tests.launching import run_longctx

FILES = ["README.md", "accelerate.yaml", "config.json", "finetune.yaml", "plan.json"]


def commands(run_folder: Path) -> list[str]:
    """The commands that the README names, in order."""
    readme = (run_folder / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```\n(.*)\n```$", readme, flags=re.MULTILINE)


@pytest.mark.timeout(300)
def test_the_run_folder_trains_and_verifies(
    run: Run,
    config: Callable[..., Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Paths are given relative to one folder, and the commands start in another. Rows are packed,
    a layer has a window, and two processes train as one does."""
    kinds = ["sliding_attention", "full_attention"]
    config(model_type="qwen2", use_sliding_window=True, sliding_window=20, layer_types=kinds)
    monkeypatch.chdir(tmp_path)
    words = ["--seq-len", 131, "--gpus", 2, "--ring", 2, "--cpu", "--rope", "yarn", "--pack"]
    words += ["--context", 262, "--data", text_file.name]
    result = run("patch", "model/config.json", *words, "--out", "runs/first run")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "first run"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    scaled = AutoConfig.from_pretrained(folder)
    assert scaled.rope_parameters["factor"] == 262 / 64
    assert (scaled.rope_parameters["rope_type"], scaled.max_position_embeddings) == ("yarn", 262)

    readme = (folder / "README.md").read_text()
    assert "| context | 262 tokens | --context: what RoPE reaches; rows are shorter" in readme
    assert "| rope | yarn | factor 4.09375 from 64 tokens |" in readme
    assert (
        "| attention | 1 layer of window 20, 1 layer causal | documents of a row don't see"
        in readme
    )
    assert "66 tokens per CPU process" in readme  # 132 / 2: 131 tokens and one of padding
    assert "Rows are packed" in readme
    assert "with `--resume`, added to its own command" in readme

    start, launch, verify, report, evaluate = commands(folder)
    assert evaluate == f"{report.replace('report', 'eval')} --cpu"
    assert start in result.output
    program, *arguments = shlex.split(start)
    assert (program, arguments[0]) == ("longctx", "train")
    code, printed = run_longctx(tmp_path / "said", *arguments, "--max-steps", "2")  # elsewhere
    assert code == 0, printed
    assert launch.startswith("accelerate launch --config_file ")
    lines = read_metrics(folder / "training")
    again = ["--settings", str(folder / "finetune.yaml"), "--max-steps", "2"]
    finetune.main([*again, "--ring", "1", "--output", "one"])
    for two, one in zip(lines, read_metrics(tmp_path / "one"), strict=True):
        for name in ("step", "loss", "grad_norm", "tokens", "packing_efficiency"):
            assert two[name] == pytest.approx(one[name], rel=1e-5), name
    assert (folder / "training" / "final" / "adapter_config.json").is_file()

    program, *arguments = shlex.split(verify)
    assert program == "longctx"
    checked = run(*arguments)
    assert checked.exit_code == 0, checked.output
    assert "2 process(es) against one" in checked.output
    assert "mask: window 20, 10 documents" in checked.output
    assert "balanced" in checked.output
    assert "verify: ok: 1 of 1 cases" in checked.output

    said = run(*shlex.split(report)[1:])
    assert said.output.startswith("Finished: 2 steps")
    page = (folder / "report.html").read_text()
    assert "<td>ulysses 1 x ring 2</td>" in page  # what was decided
    assert "<td>max_steps</td><td>2</td>" in page  # as used, not as in finetune.yaml


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, "2 layers causal"),
        ({"num_hidden_layers": 1}, "1 layer causal"),
        (
            {"model_type": "gemma2", "sliding_window": 16},
            "1 layer of window 16, 1 layer causal, softcap 50",
        ),
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 4},
            "2 layers of window 128, 2 layers causal, sinks",
        ),
        (
            {"model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 16},
            "3 layers of chunks of 16, 1 layer causal",
        ),
    ],
)
def test_the_readme_says_what_layers_see(
    run: Run, config: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], layers: str
) -> None:
    words = ["--seq-len", 64, "--gpus", 2, "--out", tmp_path / "run"]
    result = run("patch", config(head_dim=8, **changes), *words)
    assert result.exit_code == 0, result.output
    readme = (tmp_path / "run" / "README.md").read_text()
    assert f"| attention | {layers} | within rows of joined text" in readme
    assert f"that its attention ({layers}) is covered" in " ".join(readme.split())
    assert "add `--pack`" in " ".join(readme.split())


def test_what_is_kept_where_on_one_gpu(
    run: Run, config: Callable[..., Path], tmp_path: Path
) -> None:
    words = "--seq-len 64 --gpus 1 --attention-kept 0.5 --states-on-host --dtype bfloat16 --rank 8"
    result = run("patch", config(), *words.split(), "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    launch = yaml.safe_load((tmp_path / "run" / "accelerate.yaml").read_text())
    assert (launch["distributed_type"], launch["num_processes"]) == ("FSDP", 1)
    assert launch["fsdp_config"]["fsdp_offload_params"] is True
    found = ["--settings", str(tmp_path / "run" / "finetune.yaml"), "--text", "a.txt"]
    settings = parse_settings(found)
    assert (settings.attention_kept, settings.dtype, settings.lora_rank) == (0.5, "bfloat16", 8)
    readme = (tmp_path / "run" / "README.md").read_text()
    assert (
        "| attention kept | of 50% of the tokens | --attention-kept: recomputing the rest" in readme
    )
    assert "of hosts (FSDP2) | --states-on-host: in bfloat16, a layer at a time on the" in readme


def test_weights_of_four_bits(run: Run, config: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    path = config()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    model.save_pretrained(path.parent)
    words = "--seq-len 64 --gpus 2 --load-in-4bit --tokenizer bytes"
    result = run("patch", path.parent, *words.split(), "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    launch = yaml.safe_load((tmp_path / "run" / "accelerate.yaml").read_text())
    assert launch["distributed_type"] == "MULTI_GPU"
    settings = parse_settings(
        ["--settings", str(tmp_path / "run" / "finetune.yaml"), "--text", "a.txt"]
    )
    assert (settings.load_in_4bit, settings.dtype) == (True, "auto")
    readme = (tmp_path / "run" / "README.md").read_text()
    assert "| weights | 4 bits (NF4) |" in readme


def test_a_checkpoint_that_reads_images(run: Run, tmp_path: Path) -> None:
    seeing_model("qwen3_vl", vocab_size=258).save_pretrained(tmp_path / "seeing")
    words = "--seq-len 64 --gpus 2 --full --cpu --tokenizer bytes"
    result = run("patch", tmp_path / "seeing", *words.split(), "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    readme = (tmp_path / "run" / "README.md").read_text()
    assert "| images | left out | qwen3_vl reads them: its text model is trained" in readme


@pytest.mark.parametrize("published", ["default", "dynamic"])
def test_a_job_of_two_nodes_without_text(
    run: Run, config: Callable[..., Path], tmp_path: Path, published: str
) -> None:
    rope = {"rope_type": published, "rope_theta": 1e4, "factor": 2.0}
    folder = tmp_path / "run"
    words = ["--seq-len", 1000, "--gpus", 16, "--nodes", 2, "--rope", "dynamic", "--full"]
    result = run("patch", config(rope_parameters=rope), *words, "--out", folder)
    assert result.exit_code == 0, result.output
    launch = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert (launch["distributed_type"], launch["num_machines"]) == ("FSDP", 2)
    assert launch["num_processes"] == 16
    readme = (folder / "README.md").read_text()
    assert "ulysses 2 x ring 8" in readme
    assert "64 tokens per GPU" in readme  # zigzag pads 1,000 to a multiple of 2 x 16
    assert "`--machine_rank N` (0 to 1) and `--main_process_ip`" in readme
    assert f"`sbatch --nodes 2 --gpus-per-node 8 {folder}/slurm.sh {folder}`" in readme
    assert (folder / "slurm.sh").read_text().startswith("#!/bin/bash\n")
    assert commands(folder)[0].endswith("--text TEXT_FILE_OR_FOLDER")
    found = ["--settings", str(folder / "finetune.yaml"), "--text", "a.txt"]
    settings = parse_settings(found)
    assert (settings.ulysses, settings.ring, settings.rope) == (2, 8, "dynamic")
    assert settings.full
    assert settings.text == ["a.txt"]
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_type"] == "default"


def test_rows_are_as_long_as_the_context_and_weights_beside_a_config_are_named(
    run: Run, config: Callable[..., Path], tmp_path: Path
) -> None:
    file, out = config(), tmp_path / "run"
    (file.parent / "model.safetensors").touch()
    words = ["--context", 256, "--rope", "theta", "--out", out]
    assert "--gpus 2 --cpu for the CPU" in run("patch", file, *words).output
    said = run("patch", file, *words, "--gpus", 2, "--full")
    assert said.exit_code == 0, said.output
    assert "random weights: a bare config, NOT those beside it" in said.output
    assert ("No GPU is here" in said.output) is not torch.cuda.is_available()
    settings = parse_settings(["--settings", str(out / "finetune.yaml"), "--text", "a.txt"])
    assert (settings.seq_len, settings.context or settings.seq_len) == (256, 256)
