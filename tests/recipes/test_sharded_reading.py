"""Recipes under FSDP2: each process reads its own rows of the weights, and the numbers are those of
processes that read everything; what can't be read by rows is read whole or refused."""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

from longctx_patch.plugin import unread
from longctx_patch.recipes import dpo, finetune, sft
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.models import four_bits
from longctx_patch.trainer import mixin
from tests.plugin.launched import run_in_turn, sharding_on_cpus
from tests.recipes.conftest import write_records
from tests.recipes.trl_jobs import save_config
from tests.trl.cases import rows


def prefer(given: list[str]) -> Any:
    """DPO; a reference that is read whole is sharded by TRL itself, whole and as one unit."""
    kept = patch.object(mixin, "shard_frozen", lambda *_: None)
    with kept if "--no-load-sharded" in given else nullcontext():
        return dpo.main(given)


RECIPES: dict[str, Callable[[list[str]], Any]] = {
    "finetune": finetune.main,
    "sft": sft.main,
    "dpo": prefer,
}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
WHOLE = ["--no-load-sharded"]
EVALUATES = ["--eval-strategy", "steps", "--eval-steps", "2"]
HOWS: tuple[tuple[str, list[str]], ...] = (("rows", []), ("whole", WHOLE))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of several files, with a tokenizer."""
    folder = tmp_path / "model"
    config = LlamaConfig(**save_config(folder))
    set_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    for name, kind, seed in (("texts", "text", 4), ("held", "text", 9), ("pairs", "pairs", 3)):
        write_records(tmp_path / f"{name}.jsonl", rows(kind, 8, seed))
    return folder


def arguments(recipe: str, model: Path, output: str, *more: str) -> list[str]:
    """A run on two processes, of two steps unless `more` says another number."""
    folder = model.parent
    usual = ["--model", str(model), "--seq-len", "64", "--ring", "2", "--max-steps", "2"]
    usual += ["--learning-rate", "0.01", *more]
    place = str(folder / output)
    if recipe == "finetune":
        return [*usual, "--text", str(folder / "texts.jsonl"), "--output", place]
    data = "pairs" if recipe == "dpo" else "texts"
    usual += ["--data", str(folder / f"{data}.jsonl"), "--output-dir", place, "--use-cpu", "true"]
    return [*usual, "--bf16", "false", "--logging-steps", "1", "--optim", "sgd"]


@dataclass(frozen=True)
class Ran:
    """What a run did on one process."""

    by_rows: int
    """How often a model was read by rows."""
    said: list[str]
    """Lines about what was not read so."""


def run(recipe: str, given: list[str], away: Path | None) -> Ran:
    """A run of a recipe on this process; a checkpoint may be put away before."""
    os.environ |= FSDP2
    if away is not None:
        with suppress(FileNotFoundError):  # the other process was faster
            away.rename(away.parent / f"away-{away.name}")
    with counting() as counted, sharding_on_cpus(), redirect_stdout(io.StringIO()) as printed:
        RECIPES[recipe](given)
    said = [line for line in printed.getvalue().splitlines() if "reads all" in line]
    return Ran(len(counted), said)


@contextmanager
def counting() -> Iterator[list[Any]]:
    """Has an entry for each model that is read by rows."""
    read, models = unread._read, list[Any]()

    def noted(*args: Any) -> None:
        models.append(None)
        read(*args)

    with patch.object(unread, "_read", noted):
        yield models


def run_all(recipe: str, *runs: list[str], away: dict[int, Path] | None = None) -> list[list[Ran]]:
    """`run` on two processes; for each run what each process found."""
    away = away or {}
    return run_in_turn(2, *((run, (recipe, given, away.get(n))) for n, given in enumerate(runs)))


def numbers(folder: Path) -> list[dict[str, float]]:
    """What each step logged of the model, without times."""
    wanted = ("loss", "grad_norm", "rewards/margins", "rewards/chosen")
    lines = [{name: line[name] for name in wanted if name in line} for line in read_metrics(folder)]
    return [line for line in lines if line]


def weights(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("recipe", "saving", "newest"),
    [
        ("finetune", ["--save-every", "2"], "checkpoint-4"),
        ("sft", ["--save-strategy", "steps", "--save-steps", "2"], "checkpoint-4"),
    ],
)
def test_numbers_are_those_of_weights_read_whole(
    recipe: str, saving: list[str], newest: str, model: Path
) -> None:
    """To the last bit, of adapters beside which embeddings (tied ones too) and norms are trained;
    also of a run that was resumed, and where a checkpoint follows an evaluation, which leaves the
    norm and the head whole. test_text_model.py has runs that train all weights."""
    if recipe == "finetune":
        tied = AutoModelForCausalLM.from_pretrained(model)
        tied.config.tie_word_embeddings = True
        tied.tie_weights()
        for file in model.glob("*.safetensors*"):
            file.unlink()
        tied.save_pretrained(model, max_shard_size="20KB")
    usual = ["--lora", *saving, "--max-steps", "4", "--also-train", "embeddings,norms"]
    if recipe == "sft":
        usual += ["--eval-data", str(model.parent / "held.jsonl"), *EVALUATES]
    rows, whole = (arguments(recipe, model, how, *usual, *more) for how, more in HOWS)
    ours, theirs = (model.parent / how for how, _ in HOWS)
    found = run_all(recipe, rows, whole, [*rows, "--resume"], away={2: ours / newest})
    assert found == [[Ran(count, [])] * 2 for count in (1, 0, 1)]
    assert numbers(ours) == numbers(theirs)
    assert len({line["loss"] for line in numbers(ours)[:4]}) == 4
    assert_equal(weights(ours / "final"), weights(theirs / "final"))
    assert (ours / newest).is_dir(), "it was resumed"
    if recipe == "finetune":
        finetune.main(arguments(recipe, model, "one", *usual, "--ring", "1"))
        alone = numbers(model.parent / "one")
        assert alone == [pytest.approx(line, rel=1e-5) for line in numbers(ours)[:4]]


@pytest.mark.timeout(300)
def test_a_preference_is_learned_against_the_model_as_it_was(model: Path) -> None:
    """All weights are trained: the reference is a second model, in the dtype of its files where the
    layers compute in it. The numbers are those of one that every process reads whole in float32."""
    low = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    low.save_pretrained(model)
    (model / "model.safetensors.index.json").unlink()
    runs = [arguments("dpo", model, how, "--full", *more) for how, more in HOWS]
    runs = [[*run, "--bf16", "true"] for run in runs]
    found = run_all("dpo", *runs)
    assert found == [[Ran(2, [])] * 2, [Ran(0, [])] * 2]
    ours, theirs = (model.parent / how for how, _ in HOWS)
    logged = numbers(ours)
    assert logged == numbers(theirs)
    assert_equal(weights(ours / "final"), weights(theirs / "final"))
    assert logged[0]["rewards/chosen"] == logged[0]["rewards/margins"] == 0  # equal at first
    assert abs(logged[1]["rewards/margins"]) > 1e-6


@pytest.mark.timeout(300)
def test_what_is_computed_ahead_needs_whole_weights(model: Path) -> None:
    """The reference's numbers were those of weights that were not read yet."""
    ahead = ["--precompute-ref-log-probs", "true", "--lora"]
    found = run_all("dpo", *(arguments("dpo", model, how, *ahead, *more) for how, more in HOWS))
    assert found == [[Ran(0, [])] * 2] * 2
    logged, wanted = (numbers(model.parent / how) for how, _ in HOWS)
    assert logged == wanted
    assert abs(logged[0]["rewards/chosen"]) < 1e-6


@pytest.mark.timeout(300)
def test_what_is_not_in_safetensors_is_read_whole_and_said(model: Path) -> None:
    files = list(model.glob("*.safetensors"))
    torch.save({n: w for file in files for n, w in load_file(file).items()}, model / "whole.bin")
    by_rows = arguments("finetune", model, "rows")
    other = model.parent / "pickled"
    other.mkdir()
    for file in model.iterdir():
        if "safetensors" not in file.name:
            (other / file.name.replace("whole", "pytorch_model")).write_bytes(file.read_bytes())
    found = run_all("finetune", by_rows, arguments("finetune", other, "pickled-run"))
    by_row, (first, second) = found
    assert by_row == [Ran(1, [])] * 2
    assert (first.by_rows, second) == (0, Ran(0, []))
    assert f"model '{other}' has no weights in safetensors. Load it with" in first.said[0]
    assert numbers(model.parent / "rows") == numbers(model.parent / "pickled-run")


def test_quantised_weights_are_read_whole_and_said(model: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = model.parent / "quantised"
    options = {"quantization_config": four_bits(torch.float32), "device_map": {"": "cpu"}}
    quantised = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **options)
    quantised.save_pretrained(folder)
    for file in model.glob("token*"):
        shutil.copy(file, folder)
    runs = [arguments("finetune", folder, how, *more) for how, more in HOWS]
    (first, second), whole = run_all("finetune", *runs)
    assert len(first.said) == 1
    assert f"model '{folder}' has quantised weights, which are not read by rows" in first.said[0]
    assert whole == [second] * 2 == [Ran(0, [])] * 2
    assert numbers(model.parent / "rows") == numbers(model.parent / "whole")
