"""`longctx patch --gpus 4xH200` writes its prediction into the run folder, or refuses the run."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Run
from tests.planner import jobs

Write = Callable[..., Path]
LLAMA_8B = jobs.LLAMA_8B | {"max_position_embeddings": 2**21}
HYBRID = {
    **{"model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288},
    **{"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 2**21},
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
}
"""Qwen3.5-9B's sizes; those of its gated delta nets are the default ones."""


def patch(run: Run, model: Path, out: Path, gpus: str, *words: object) -> tuple[int, str]:
    result = run("patch", model, "--gpus", gpus, "--out", out, *words)
    return result.exit_code, result.output


def test_the_folder_says_what_is_predicted(run: Run, config: Write, tmp_path: Path) -> None:
    words = ("--seq-len", 131072, "--full")
    code, output = patch(run, config(**LLAMA_8B), tmp_path / "run", "4xH200", *words)
    assert code == 0, output
    readme = (tmp_path / "run" / "README.md").read_text()
    assert "| memory | 125 GiB of a GPU | predicted for 4xH200, of 129 that it may be |" in readme
    assert "tokens/s per GPU, 52% MFU" in readme
    settings = yaml.safe_load((tmp_path / "run" / "finetune.yaml").read_text())
    assert settings["hardware"] == "h200"
    assert yaml.safe_load((tmp_path / "run" / "accelerate.yaml").read_text())["num_processes"] == 4


def test_models_with_gated_delta_nets_are_predicted(
    run: Run, config: Write, tmp_path: Path
) -> None:
    """So is the choice by the rows of a step; a run that does not fit is refused."""
    model = config(**HYBRID)
    words = ("--seq-len", 131072, "--full")
    code, output = patch(run, model, tmp_path / "run", "4xH200", *words)
    assert code == 0, output
    readme = (tmp_path / "run" / "README.md").read_text()
    assert re.search(r"\| memory \| \d+ GiB of a GPU \| predicted for 4xH200, of 129", readme)
    assert "24 layers recurrent (gated delta rule)" in readme
    code, output = patch(run, model, tmp_path / "rows", "4xH200", *words, "--rows-per-step", 4)
    assert code == 0, output
    assert "of 4 rows per step, " in output
    code, output = patch(run, model, tmp_path / "large", "1xH200", "--seq-len", 2**20, "--full")
    assert code == 1
    assert "--gpus 1xH200: the run needs" in output


def test_what_will_not_fit_is_refused(run: Run, config: Write, tmp_path: Path) -> None:
    """Three runs are refused: a row too long for the GPU; float32 states too large for one GPU,
    with the advice to move them to the host; a policy that keeps too much, with another advised."""
    model = config(**LLAMA_8B | {"max_position_embeddings": 2**23})
    code, output = patch(run, model, tmp_path / "run", "1xH200", "--seq-len", 2**22, "--full")
    assert code == 1
    assert re.search(r"the longest row predicted to fit on 1xH200 has 1,\d{3},\d{3} tokens", output)
    code, output = patch(run, model, tmp_path / "run", "1xH200", "--seq-len", 131072, "--full")
    assert code == 1
    assert "--gpus 1xH200: the run needs 134 GiB of the 129" in output
    assert "--checkpoint auto --mlp-tiles 2 --states-on-host is predicted to take" in output
    words = ("--seq-len", 131072, "--full", "--checkpoint", "none")
    code, output = patch(run, model, tmp_path / "run", "4xH200", *words)
    assert code == 1
    assert "--checkpoint auto --mlp-tiles 1 is predicted to take" in output
    assert not (tmp_path / "run").exists()


def test_a_card_without_room_is_told_what_to_type(run: Run, config: Write, tmp_path: Path) -> None:
    """States to the host, or weights of 4 bits; where neither fits, an adapter."""
    model = config(**LLAMA_8B, dtype="bfloat16")
    words = ("--seq-len", 32768, "--host-gib", 64)
    code, output = patch(run, model, tmp_path / "run", "1xRTX4090", *words)
    assert code == 1
    assert "--mlp-tiles 2 --states-on-host is predicted to take" in output
    narrow = "--load-in-4bit --ulysses 1 --ring 1 --checkpoint auto --mlp-tiles"
    assert re.search(narrow + r" \d is predicted to fit\.", output)
    code, output = patch(run, model, tmp_path / "run", "1xRTX4090", *words, "--full")
    assert code == 1
    assert "no row is predicted to fit on 1xRTX4090: train an adapter (--lora)" in output
    code, output = patch(run, model, tmp_path / "run", "1xRTX4090", *words, "--states-on-host")
    assert code == 0, output
    assert "MFU; rates by data sheet, not measured" in output


def test_a_small_host_refuses_the_run(run: Run, config: Write, tmp_path: Path) -> None:
    model = config(**LLAMA_8B)
    words = ("--seq-len", 2**20, "--full", "--checkpoint", "offload")
    code, output = patch(run, model, tmp_path / "any", "4xH200", *words)
    assert code == 0, output
    assert "of a host (not checked: --host-gib)" in output
    code, output = patch(run, model, tmp_path / "small", "4xH200", *words, "--host-gib", 400)
    assert code == 1
    assert "of the 380 that may be taken on a host" in output
    assert "--checkpoint auto" in output
    code, output = patch(run, model, tmp_path / "large", "4xH200", *words, "--host-gib", 1000)
    assert code == 0, output
    assert "not checked" not in output
    for gpus, *more in (("4",), ("4xH200", "--cpu")):
        code, output = patch(run, model, tmp_path / "x", gpus, *words, "--host-gib", 400, *more)
        assert code == 1
        assert "--host-gib 400" in output
        assert "such as --gpus 4xH200, and leave out --cpu" in output


@pytest.mark.parametrize("gpus", ["0", "x", "-1", "4xB300", "12xH100", "4x", "16xH200"])
def test_bad_gpus(run: Run, config: Write, tmp_path: Path, gpus: str) -> None:
    code, output = patch(run, config(), tmp_path / "run", gpus, "--seq-len", 64)
    assert code in (1, 2)
    assert gpus in output
    rules = {
        "12xH100": "a multiple of 8",
        "16xH200": "machines of H200 have up to 8. Use --nodes 2.",
    }
    assert rules.get(gpus, "4xH200") in output


def test_where_nothing_can_be_predicted(run: Run, config: Write, tmp_path: Path) -> None:
    """A model with experts, pairs and processes on the CPU get a folder without a prediction; for
    pairs there was that of rows without a reference."""
    experts = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
    hybrid = {"model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 8}
    hybrid |= {"attn_layer_indices": [1]}
    for name, words, changes, said in (
        ("experts", (), experts, "what num_local_experts=4 takes is not predicted; the rehearsal"),
        (
            "hybrid",
            (),
            hybrid,
            "what the recurrence (layer 0 is linear_attention) takes is not pre",
        ),
        ("pairs", ("--dpo",), {}, "what pairs and their reference take is not predicted; the"),
        ("cpu", ("--cpu",), {}, ""),
    ):
        model, asked = config(**changes), ("--seq-len", 64, *words)
        code, output = patch(run, model, tmp_path / name, "2xH200", *asked)
        assert code == 0, output
        assert ("not predicted" in output) == bool(said)
        assert said in output
        assert ("recurrent kernels" in output) == (name == "hybrid")
        if said:
            more = (*asked, "--host-gib", 400)
            code, output = patch(run, model, tmp_path / "x", "2xH200", *more)
            assert code == 1
            assert "--host-gib 400: what" in output
        readme = (tmp_path / name / "README.md").read_text()
        assert "Not checked: that memory suffices" in readme
        crossing = (
            "attention and recurrent states cross" if name == "hybrid" else "attention crosses"
        )
        assert f"The first training step checks that {crossing} the ranks" in readme
