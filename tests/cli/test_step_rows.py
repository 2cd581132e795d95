"""`longctx patch` with the rows or tokens of a step: who shares what, and a folder that trains."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Run
from tests.planner.jobs import LLAMA_8B

WriteConfig = Callable[..., Path]
EIGHT_LAYERS = LLAMA_8B | {"num_hidden_layers": 8, "max_position_embeddings": 131072}


@pytest.fixture
def eight_layers(config: WriteConfig) -> Path:
    return config(**EIGHT_LAYERS)


def patched(run: Run, model: Path, out: Path, *words: object) -> str:
    """The README of a run folder for rows of 32,768 tokens."""
    given = [*(() if "--gpus" in words else ("--gpus", "4xH200")), "--tokenizer", "bytes"]
    found = run("patch", model, "--seq-len", 32768, *given, *words, "--out", out)
    assert found.exit_code == 0, found.output
    return (out / "README.md").read_text()


def decided(folder: Path, file: str = "finetune.yaml") -> tuple[int, int, int, int, int]:
    """Ulysses, ring, forwards, and Accelerate's sizes of the sequence and of shards."""
    settings = yaml.safe_load((folder / file).read_text())
    sizes = yaml.safe_load((folder / "accelerate.yaml").read_text())["parallelism_config"]
    assert settings.get("batch_size", settings.get("per_device_train_batch_size")) == 1
    assert sizes["parallelism_config_dp_replicate_size"] == 1
    return (
        settings["ulysses"],
        settings["ring"],
        settings["gradient_accumulation_steps"],
        sizes["parallelism_config_cp_size"],
        sizes["parallelism_config_dp_shard_size"],
    )


@pytest.mark.parametrize("asked", [("--rows-per-step", 8), ("--tokens-per-step", "256K")])
def test_each_gpu_takes_rows_of_its_own(
    run: Run, eight_layers: Path, tmp_path: Path, asked: tuple[object, ...]
) -> None:
    readme = patched(run, eight_layers, tmp_path / "run", *asked)
    assert decided(tmp_path / "run") == (1, 1, 2, 1, 4)
    assert "| degrees | ulysses 1 x ring 1 | of 8 rows per step, 1 per row predicted " in readme
    assert f"| rows per step | 8, of 262,144 tokens in all | {asked[0]}: 4 at once x 2 " in readme


def test_a_faster_number_of_gpus_per_row_is_said(
    run: Run, eight_layers: Path, tmp_path: Path
) -> None:
    words = ["--gpus", "2xH200", "--seq-len", 8192, "--tokenizer", "bytes"]
    said = run("patch", eight_layers, *words, "--out", tmp_path / "run").output
    (line,) = (line for line in said.splitlines() if line.startswith("Faster: "))
    assert line.startswith("Faster: --sequence-degree 1 is predicted to train ")
    assert line.endswith("with steps of 2 in place of 1 rows.")
    asked = [*words, "--sequence-degree", 2, "--out", tmp_path / "asked"]
    assert "Faster" not in run("patch", eight_layers, *asked).output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (4, 1, 1, 4, 1)),
        ("--rows-per-step 2", (2, 1, 1, 2, 2)),
        ("--rows-per-step 3", (4, 1, 3, 4, 1)),
        # Degrees that are named stay; nothing is compared then, so the number of GPUs is enough.
        ("--rows-per-step 8 --sequence-degree 2", (2, 1, 4, 2, 2)),
        ("--rows-per-step 8 --sequence-degree 2 --ring 2 --gpus 4", (1, 2, 4, 2, 2)),
    ],
)
def test_who_shares_a_row(
    run: Run, eight_layers: Path, tmp_path: Path, words: str, expected: tuple[int, ...]
) -> None:
    readme = patched(run, eight_layers, tmp_path / "run", *words.split())
    assert decided(tmp_path / "run") == expected
    assert ("rows per step" in readme) == bool(words)
    why = "no other number of GPUs per row is possible with 3 rows per step"
    assert (why in readme) == (words == "--rows-per-step 3")


def test_recipes_over_trl_accumulate_too(run: Run, eight_layers: Path, tmp_path: Path) -> None:
    chats = tmp_path / "pairs.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    patched(run, eight_layers, tmp_path / "run", "--rows-per-step", 12, "--data", chats)
    assert decided(tmp_path / "run", "sft.yaml") == (1, 1, 3, 1, 4)


REFUSED = {
    "--gpus 4xH200 --rows-per-step 4 --tokens-per-step 128K": (
        "both --rows-per-step and --tokens-per-step are set. Choose one."
    ),
    "--gpus 4xH200 --tokens-per-step 100000": "Use --tokens-per-step 98304 or 131072.",
    "--gpus 4xH200 --rows-per-step 10 --sequence-degree 1": (
        "so a step has a multiple of 4. Use --rows-per-step 8 or 12"
    ),
    "--gpus 4 --rows-per-step 6": (
        "--gpus names no kind of GPU, such as 4xH200. Say how many GPUs or processes share a row, "
        "such as --sequence-degree 2."
    ),
    "--gpus 2 --cpu --rows-per-step 4": "nothing is predicted for CPUs. Say how many",
    "--gpus 4xH200 --dpo --rows-per-step 8": (
        "what pairs and their reference take is not predicted. Say how many"
    ),
    "--gpus 1xA100-40 --rows-per-step 4 --full --checkpoint none": (
        "--gpus 1xA100-40: the run needs "
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(run: Run, eight_layers: Path, words: str) -> None:
    out = eight_layers.parent.parent / "refused"
    given = ("--seq-len", 32768, "--tokenizer", "bytes", "--out", out)
    found = run("patch", eight_layers, *given, *words.split())
    assert found.exit_code == 1, found.output
    assert not out.exists()
    assert REFUSED[words] in " ".join(found.output.split())
