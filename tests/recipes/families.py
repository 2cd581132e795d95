"""Every family through the recipe, whole and with an adapter, on two processes and on one.

The two shard weights under FSDP2, of which each reads its own rows; the one reads all. `make
test-families` runs this: it takes minutes, and other tests have a few of the families.
"""

import os
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner

from longctx_patch.cli.main import main
from longctx_patch.recipes import finetune
from longctx_patch.recipes.metrics import read_metrics
from tests.hf.tiny import SUPPORTED, featured_model
from tests.plugin.launched import run_in_turn, sharding_on_cpus
from tests.recipes.test_sharded_reading import FSDP2

MODES = {"full": ["--full"], "lora": ["--lora"]}
VOCABULARY, STEPS, LIMIT_S = 260, 2, 1500.0
LOSS, NORM = 1e-5, 1e-4
"""Relative, of the first step; later ones have Adam's quotients of tiny gradients in them."""
LOOKS_FOR_UNUSED = {("gemma3n_text", "lora"), ("zamba2", "lora")}
"""Adapters of modules that the model doesn't call, which DDP does not take; the two shard."""
pytestmark = pytest.mark.timeout(2 * LIMIT_S)  # whichever test comes first waits for the runs
Job = tuple[str, str, int]
"""(family, mode, ranks that share a row)"""


def folder_of(root: Path, job: Job) -> Path:
    return root / "-".join(map(str, job))


def prepare(root: Path) -> None:
    text = root / "text.txt"
    text.write_text("".join(f"{n} times {n + 3} is {n * (n + 3)}.\n" for n in range(40)))
    for family in SUPPORTED:
        sizes = {"vocab_size": VOCABULARY}
        if hasattr(featured_model(family).config, "vocab_size_per_layer_input"):
            sizes["vocab_size_per_layer_input"] = VOCABULARY
        featured_model(family, **sizes).save_pretrained(root / family)


def arguments(root: Path, job: Job) -> list[str]:
    family, mode, ring = job
    given = {
        "model": root / family,
        "tokenizer": "bytes",
        "text": root / "text.txt",
        "seq-len": 64,
        "ring": ring,
        "max-steps": STEPS,
        "learning-rate": 0.01,
        "output": folder_of(root, job),
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*words, *MODES[mode]]


def problem_of(root: Path, job: Job, shards: bool) -> str:
    """What went wrong in a job, on this process; empty where nothing did."""
    os.environ |= FSDP2 if shards else {}
    with sharding_on_cpus() if shards else nullcontext(), redirect_stdout(StringIO()):
        try:
            finetune.main(arguments(root, job))
        except Exception as error:  # told apart by family in the tests
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Job, str]]:
    """(the folder, what went wrong in each job)"""
    root = tmp_path_factory.mktemp("families")
    prepare(root)
    problems: dict[Job, str] = {}
    for ring in (1, 2):
        jobs = [(family, mode, ring) for family in SUPPORTED for mode in MODES]
        calls = ((problem_of, (root, job, ring > 1)) for job in jobs)
        for job, by_rank in zip(jobs, run_in_turn(ring, *calls, timeout_s=LIMIT_S), strict=True):
            problems[job] = "; ".join(filter(None, by_rank))
    return root, problems


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_run_folder_is_written(
    ran: tuple[Path, dict[Job, str]], family: str, tmp_path: Path
) -> None:
    root, _ = ran
    words = f"--seq-len 64 --gpus 2 --cpu --tokenizer bytes --data {root / 'text.txt'}".split()
    given = ["patch", str(root / family), *words, "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", SUPPORTED)
def test_two_processes_train_as_one(
    ran: tuple[Path, dict[Job, str]], family: str, mode: str
) -> None:
    root, problems = ran
    one, two = (family, mode, 1), (family, mode, 2)
    assert problems[two] == ""
    if (family, mode) in LOOKS_FOR_UNUSED:
        assert "find_unused_parameters" in problems[one]
        return
    assert problems[one] == ""
    (first, *_), (wanted, *_) = (read_metrics(folder_of(root, job)) for job in (two, one))
    assert first["loss"] == pytest.approx(wanted["loss"], rel=LOSS)
    assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=NORM)
