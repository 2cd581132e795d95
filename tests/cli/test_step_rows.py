"""`longctx patch` with the rows or tokens of a step: who shares what, and a folder that trains."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from longctx_patch.cli.arguments import rows_of_step
from longctx_patch.cli.step_sharing import forwards_of_step
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


def refused(run: Run, model: Path, *words: object) -> str:
    out = model.parent.parent / "refused"
    found = run("patch", model, "--seq-len", 32768, "--tokenizer", "bytes", *words, "--out", out)
    assert found.exit_code == 1, found.output
    assert not out.exists()
    return found.output


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


def test_without_them_all_gpus_share_a_row(run: Run, eight_layers: Path, tmp_path: Path) -> None:
    readme = patched(run, eight_layers, tmp_path / "run")
    assert decided(tmp_path / "run") == (4, 1, 1, 4, 1)
    assert "rows per step" not in readme


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


def test_rows_that_few_degrees_divide(run: Run, eight_layers: Path, tmp_path: Path) -> None:
    patched(run, eight_layers, tmp_path / "two", "--rows-per-step", 2)
    assert decided(tmp_path / "two") == (2, 1, 1, 2, 2)
    readme = patched(run, eight_layers, tmp_path / "three", "--rows-per-step", 3)
    assert decided(tmp_path / "three") == (4, 1, 3, 4, 1)
    assert "no other number of GPUs per row is possible with 3 rows per step" in readme


def test_degrees_that_are_named_stay(run: Run, eight_layers: Path, tmp_path: Path) -> None:
    """Nothing is compared then, so the number of GPUs is enough."""
    words = ("--rows-per-step", 8, "--sequence-degree", 2)
    patched(run, eight_layers, tmp_path / "kind", *words)
    assert decided(tmp_path / "kind") == (2, 1, 4, 2, 2)
    patched(run, eight_layers, tmp_path / "number", *words, "--ring", 2, "--gpus", 4)
    assert decided(tmp_path / "number") == (1, 2, 4, 2, 2)


def test_recipes_over_trl_accumulate_too(run: Run, eight_layers: Path, tmp_path: Path) -> None:
    chats = tmp_path / "pairs.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    patched(run, eight_layers, tmp_path / "run", "--rows-per-step", 12, "--data", chats)
    assert decided(tmp_path / "run", "sft.yaml") == (1, 1, 3, 1, 4)


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "both": (
        ("--gpus", "4xH200", "--rows-per-step", 4, "--tokens-per-step", "128K"),
        "both --rows-per-step and --tokens-per-step are set. Choose one.",
    ),
    "part of a row": (
        ("--gpus", "4xH200", "--tokens-per-step", 100_000),
        "Use --tokens-per-step 98304 or 131072.",
    ),
    "rows left over": (
        ("--gpus", "4xH200", "--rows-per-step", 10, "--sequence-degree", 1),
        "4 rows are trained at once, so a step has a multiple of 4. Use --rows-per-step 8 or 12",
    ),
    "no kind": (
        ("--gpus", 4, "--rows-per-step", 6),
        "--gpus names no kind of GPU, such as 4xH200. Say how many GPUs or processes share a row, "
        "such as --sequence-degree 2.",
    ),
    "CPUs": (
        ("--gpus", 2, "--cpu", "--rows-per-step", 4),
        "nothing is predicted for CPUs. Say how many",
    ),
    "pairs": (
        ("--gpus", "4xH200", "--dpo", "--rows-per-step", 8),
        "what pairs and their reference take is not predicted. Say how many",
    ),
    "no room": (
        ("--gpus", "1xA100-40", "--rows-per-step", 4, "--full", "--checkpoint", "none"),
        "--gpus 1xA100-40: the run needs ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(run: Run, eight_layers: Path, case: str) -> None:
    words, says = REFUSED[case]
    assert says in " ".join(refused(run, eight_layers, *words).split())


def test_rows_of_a_step_by_hand() -> None:
    assert rows_of_step(None, None, 1000) is None
    assert rows_of_step(7, None, 1000) == 7
    assert rows_of_step(None, 3000, 1000) == 3
    with pytest.raises(ValueError, match=r"Use --tokens-per-step 1000\."):
        rows_of_step(None, 999, 1000)
    assert forwards_of_step(None, 8, 2) == 1
    assert forwards_of_step(12, 8, 2) == 3
