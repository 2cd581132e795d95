"""`longctx eval`: two processes give one process's numbers, and those of stock transformers."""

import json
import warnings
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from longctx_patch.cli.main import main as longctx
from longctx_patch.recipes import evaluate, finetune, models, sft
from longctx_patch.recipes.evaluated import base_of, config_of, find, load
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.model_card import ADAPTER_FILE
from longctx_patch.recipes.settings import parse_settings
from tests.launching import run_longctx
from tests.recipes.conftest import write_records

LENGTH = 512
QUESTION = {"context": "3 is 18.", "question": "What is 3?", "answers": "18", "wrong": ["17"]}


@pytest.fixture
def run(base: Path, text_file: Path, tmp_path: Path) -> Path:
    """A run that has extended it to 512 by an adapter, of two processes."""
    words = ["--seq-len", str(LENGTH), "--rope", "yarn", "--gpus", "2", "--cpu", "--ring", "2"]
    words += ["--data", str(text_file), "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(longctx, ["patch", str(base), *words])
    assert done.exit_code == 0, done.output
    flags = ["--ring", "1", "--max-steps", "2", "--save-every", "1", "--learning-rate", "1e-2"]
    finetune.main(["--settings", str(tmp_path / "run/finetune.yaml"), *flags])
    return tmp_path / "run"


def scores(folder: Path) -> list[dict[str, Any]]:
    content = json.loads((folder / evaluate.SCORES_FILE).read_text())
    return [each["scores"] for each in content["models"]]


def loss_of(model: Any, text: Path, length: int) -> float:
    """The mean loss of stock transformers on the beginning of the text."""
    ids = AutoTokenizer.from_pretrained(text.parent / "base")(text.read_text())["input_ids"]
    row = torch.tensor([ids[:length]])
    with torch.no_grad():
        return float(model(input_ids=row, labels=row).loss)


def test_a_run_beside_its_base(run: Path, base: Path, text_file: Path, tmp_path: Path) -> None:
    """Over two processes as its launcher starts them, in one process, and by stock transformers."""
    asked = ["eval", str(run), "--text", str(text_file), "--samples", "2"]  # on the CPU, as the run
    questions = write_records(tmp_path / "own.jsonl", [QUESTION])
    asked += ["--questions", str(questions), "--lengths", "320,512", "--json", "--out"]
    code, said = run_longctx(tmp_path / "said", *asked, tmp_path / "two")
    assert code == 0, said
    assert '"format"' in said
    words = [*asked, str(tmp_path / "one"), "--num-processes", "1", "--dry-run"]
    assert CliRunner().invoke(longctx, words).exit_code == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Unexpected keyword")  # peft's, of our own mark
        evaluate.main([str(tmp_path / "one")])
    ours, alone = scores(tmp_path / "two"), scores(tmp_path / "one")
    assert [each["label"] for each in ours] == ["base", "run"]
    final = run / "training/final"
    plain = AutoModelForCausalLM.from_pretrained(base)
    tuned = AutoModelForCausalLM.from_pretrained(base, config=AutoConfig.from_pretrained(final))
    models = [plain, PeftModel.from_pretrained(tuned, final)]
    for mine, theirs, model in zip(ours, alone, models, strict=True):
        losses, tokens = (mine["loss_by_position"][name] for name in ("loss", "tokens"))
        assert losses == pytest.approx(theirs["loss_by_position"]["loss"], rel=1e-5)
        loss = sum(map(mul, losses, tokens)) / sum(tokens)
        assert loss == pytest.approx(loss_of(model, text_file, LENGTH), rel=1e-5)
        assert mine["tasks"] == theirs["tasks"]
        assert len(mine["tasks"]["passkey"]["cells"]) == 10
        (cell,) = mine["tasks"]["questions"]["cells"]
        assert (cell["length"], cell["samples"]) == (LENGTH, 1)
    notes = [
        each["notes"] for each in json.loads((tmp_path / "two/scores.json").read_text())["models"]
    ]
    assert "reaches 64 tokens, and is evaluated beyond without another RoPE" in notes[0]
    assert notes[1] == ["weights in float32"]


def test_which_weights_a_run_stands_for(run: Path, base: Path) -> None:
    beyond = CliRunner().invoke(longctx, ["eval", str(run), "--lengths", "1K"])  # --cpu: the run's
    assert "1024 tokens, but run was trained to reach 512. Give --lengths up to" in beyond.output
    found = find(str(run))
    assert found.adapter == str((run / "training/final").resolve())
    assert (found.model, found.degrees) == (str(base), (1, 2))
    record = run / "training/settings.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"ended": False}))  # as while it goes on
    assert find(str(run)).adapter.endswith("checkpoint-2")
    assert find(str(run)).label == "run, checkpoint-2"
    assert find(str(run / "training")).adapter.endswith("checkpoint-2")
    final = run / "training/final"
    assert (find(str(final)).model, find(str(final)).is_trained) == (str(base), True)
    assert find(str(final)).label == "run"
    with pytest.raises(ValueError, match=r"is a run folder, in which .* give that, '.*/final'"):
        models.check_weights(str(run))
    (final / "config.json").unlink()  # as adapters trained elsewhere, which may be given a RoPE
    assert not find(str(final)).is_trained
    with pytest.raises(ValueError, match=r"an adapter, which is no model to train.*longctx merge"):
        models.check_weights(str(final))
    moved = json.loads((final / ADAPTER_FILE).read_text()) | {"base_model_name_or_path": "/gone"}
    (final / ADAPTER_FILE).write_text(json.dumps(moved))
    with pytest.raises(ValueError, match=r"has /gone as its base, which is not there.*has moved"):
        find(str(final))
    with pytest.raises(ValueError, match=r"trained from /gone, which is not there.*--alone"):
        base_of(find(str(run)).with_(base="/gone"))
    for path in (run / "training").rglob("adapter_config.json"):
        path.unlink()
    for path in (run / "training").rglob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match="has no trained model yet"):
        find(str(run))


def test_an_adapter_over_a_base_that_changed_is_refused(run: Path, base: Path) -> None:
    final = run / "training/final"
    found = find(str(final)).with_(dtype="float32")
    assert found.model == str(base)
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
    for place in (run, final):
        with pytest.raises(
            ValueError, match=r"trained over: \S+ is .*longctx merge \S+final --base"
        ):
            find(str(place))
    with pytest.raises(ValueError, match="is not the one that the adapter was trained over"):
        load(found, config_of(found), torch.device("cpu"), sharded=False, say=print)


def test_the_context_is_evaluated_during_training(
    base: Path, text_file: Path, tmp_path: Path
) -> None:
    """In the text recipe and in one over TRL, at its steps and at the end; the page draws it."""
    flags = ["--eval-context-steps", "2", "--eval-context-lengths", "320", "512"]
    flags += ["--eval-context-samples", "1", "--seq-len", "64", "--max-steps", "3", "--full"]
    flags += ["--allow-beyond-reach", "--model", str(base)]
    with pytest.raises(ValueError, match="Did you mean 'passkey'"):
        parse_settings([*flags, "--text", "x", "--output", "y", "--eval-context-tasks", "passky"])
    with pytest.raises(ValueError, match="eval_context_lengths: 512 tokens, but the model reaches"):
        models.load_config(
            parse_settings([*flags[:-3], *flags[-2:], "--text", "x", "--output", "y"])
        )
    plain = [flag for flag in flags if flag not in flags[:7]]
    texts = ["--text", str(text_file), "--output"]
    rows = write_records(tmp_path / "rows.jsonl", [{"text": text_file.read_text()[:60]}])
    given = ["--use_cpu", "--bf16", "false", "--report_to", "none", "--output_dir"]
    for recipe, words in ((finetune, texts), (sft, ["--data", str(rows), *given])):
        refused = [*flags, *words, str(tmp_path / "no"), "--eval-context-tasks", "qa_1,passkey"]
        with pytest.raises(ValueError, match=r"(?s)There is no squad.*-tasks passkey"):
            recipe.main(refused)
        assert not (tmp_path / "no").exists()
    held = tmp_path / "held.txt"
    held.write_text(text_file.read_text()[::-1])
    evaluates = ["--eval-data", str(held), "--max-eval-samples", "2"]
    finetune.main([*plain, *texts, str(tmp_path / "plain"), *evaluates])
    assert read_metrics(tmp_path / "plain")[-1]["eval_tokens"] == 2 * 63
    finetune.main([*flags, *texts, str(tmp_path / "text")])
    sft.main([*flags, "--data", str(rows), *given, str(tmp_path / "sft")])
    assert [line["loss"] for line in read_metrics(tmp_path / "plain")] == [
        line["loss"] for line in read_metrics(tmp_path / "text")
    ]  # it changes nothing
    for output in (tmp_path / "text", tmp_path / "sft"):
        name = "eval_context/passkey/512"
        steps = [line["step"] for line in read_metrics(output) if name in line]
        assert steps == [2, 3]
        content = json.loads((output / "eval/step-3/scores.json").read_text())
        (passkey,) = content["models"][0]["scores"]["tasks"].values()
        assert len(passkey["cells"]) == 10
        assert CliRunner().invoke(longctx, ["report", str(output)]).exit_code == 0
        page = (output / "report.html").read_text()
        assert "Context, passkey" in page
        assert "Does it use its context?" in page
