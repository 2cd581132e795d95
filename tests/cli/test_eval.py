"""What `longctx eval` decides from files alone, what it refuses, and how it shows what it found."""

import json
import shutil
from base64 import b64encode
from collections.abc import Callable
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from transformers import AutoModelForCausalLM, LlamaConfig

from longctx_patch.cli import eval as eval_module
from longctx_patch.cli.eval_result import Result, draw, read_result, table
from longctx_patch.evaluation.positions import PositionLosses
from longctx_patch.evaluation.scores import Cell, ContextScores, TaskScores
from longctx_patch.recipes.evaluate import EvalSettings
from longctx_patch.recipes.models import byte_tokenizer
from tests.cli.conftest import Run
from tests.tiny_llama import TINY_LLAMA

LENGTHS = (128, 1024)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model of bytes that reaches 4,096 tokens."""
    config = LlamaConfig(**{**TINY_LLAMA, "max_position_embeddings": 4096})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def asked(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that runs a dry run in this process: what it wrote, or what it refused."""

    class Here:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def submit(self, function: Any, *given: Any) -> Any:
            return SimpleNamespace(result=lambda: function(*given))

    monkeypatch.setattr(eval_module, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(eval_module, "import_shared", lambda _: True)
    monkeypatch.setattr(eval_module, "limit_threads", lambda _: None)
    monkeypatch.chdir(tmp_path)

    def invoke(*words: object, cpu: bool = True) -> Any:
        before = [*tmp_path.iterdir()]
        found = run("eval", *words, "--dry-run", *["--cpu"] * cpu)
        if found.exit_code:
            assert [*tmp_path.iterdir()] == before  # nothing is left of what is refused
            return found.output
        folder = found.output.split()[2].removesuffix(".")
        return json.loads((Path(folder) / "asked.json").read_text()) | {"folder": folder}

    return invoke


def test_what_is_left_open_follows_from_the_model(asked: Callable[..., Any], model: Path) -> None:
    found = asked(model)
    assert found["lengths"] == [512, 1024, 2048, 4096]
    assert found["tasks"] == ["passkey"]
    assert Path(found["folder"]).name == "eval-tiny-dry"
    (only,) = found["models"]
    assert (only["model"], only["ulysses"], only["ring"]) == (str(model), 1, 1)
    again = asked(model, "--lengths", "512", "--num-processes", 4)
    assert again["folder"] == found["folder"]
    (Path(found["folder"]) / "scores.json").touch()  # it was started
    (only,) = again["models"]
    assert (only["ulysses"], only["ring"]) == (2, 2)  # it has two key-value heads
    again = asked(model, "--num-processes", 4, "--ring", 2, "--ulysses", 1)
    assert Path(again["folder"]).name == "eval-tiny-dry-2"
    (only,) = again["models"]
    assert (only["ulysses"], only["ring"]) == (1, 2)
    config = model / "config.json"
    before = config.read_text()
    config.write_text(json.dumps(json.loads(before) | {"max_position_embeddings": 1024}))
    assert asked(model)["lengths"] == [512, 1024]  # shorter rows have no room for most tasks
    config.write_text(before)
    bytewise = asked(model, "--beside", model, "--lengths", 512, "--tokenizer", "bytes")["models"]
    assert [each["tokenizer"] for each in bytewise] == ["bytes"] * 2
    beside = asked(model, "--beside", model, "--lengths", 512)["models"]
    assert [each["label"] for each in beside] == ["tiny (1)", "tiny (2)"]


REFUSED = {
    "--beside dynamic --num-processes 2": "dynamic (--alone leaves it out): this",
    "--lengths 8K": "8192 tokens, but the model reaches 4096",
    "--lengths 1K --context 512": "--context 512 and a row of 1024 tokens",
    "--tasks pass_key": "Did you mean 'passkey'",
    "--text text.txt": "no document of 4096 tokens",
    "--text no.txt": "no.txt",
    "--haystack no.txt": "no.txt",
    "--tasks passkey --lengths 16": "passkey: 16 tokens are too few",
    "--tasks qa_1,passkey,qa_2": "--tasks qa_2: There is no hotpotqa",
    "--tasks qa_1": "--tasks qa_1: There is no squad to ask questions of: give dev-v2.0.json",
    "--questions text.txt": "text.txt",
    "--depths 120": "depths are percent of the row",
    "--num-processes 4 --ring 3": "--ring 3",
    "--tokenizer .": "no tokenizer found",
    "--beside config.json": "is a config without weights",
    "--beside weightless": "and `longctx eval` evaluates trained ones",
    "--out tiny": "holds files",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_before_processes_start(
    asked: Callable[..., Any], model: Path, tmp_path: Path, words: str
) -> None:
    (tmp_path / "text.txt").write_text("A short document. " * 20)
    (tmp_path / "weightless").mkdir()
    shutil.copytree(model, tmp_path / "dynamic")
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "dynamic/config.json").write_text(json.dumps(config))
    for folder in (tmp_path, tmp_path / "weightless"):
        (folder / "config.json").write_text((model / "config.json").read_text())
    said = asked(model, *words.split())
    assert REFUSED[words] in said
    assert ("The others fit: --tasks passkey" in said) == ("qa_1,passkey" in words)


def test_a_haystack_of_its_own(asked: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    """Losses are those of --text; needles are hidden in --haystack, if it is given."""
    (tmp_path / "code.txt").write_text("x = 1\n" * 900)
    (tmp_path / "prose.txt").write_text("Grass is green. " * 300)
    words = (model, "--text", "code.txt", "--lengths", 1024, "--tasks", "niah_single_2")
    for more, first in (((), "x = 1"), (("--haystack", "prose.txt"), "Grass is green.")):
        found = EvalSettings.read(Path(asked(*words, *more)["folder"]))
        assert (found.sources().text or "").startswith(first)
        assert found.text == [str(tmp_path / "code.txt")]


def test_gpus_and_their_memory(
    asked: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "torch finds no GPU here" in asked(model, cpu=False)
    (model / "accelerate.yaml").write_text("use_cpu: true\n")  # as a run on the CPU has it
    assert asked(model, cpu=False)["models"]
    (model / "accelerate.yaml").unlink()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "3 GPUs to evaluate on, and torch finds 2" in asked(
        model, "--num-processes", 3, cpu=False
    )
    folder = asked(model, cpu=False)["folder"]
    assert "distributed_type: MULTI_GPU" in (Path(folder) / "accelerate.yaml").read_text()
    num_bytes = 2 * sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters())
    memory = 0.9 * num_bytes / eval_module.ROOM
    monkeypatch.setattr(eval_module, "memory_of_each", lambda *_, **__: memory / 2)
    assert "they don't fit" in asked(model, cpu=False)
    monkeypatch.setattr(eval_module, "memory_of_each", lambda *_, **__: memory)
    folder = asked(model, cpu=False)["folder"]
    assert "distributed_type: FSDP" in (Path(folder) / "accelerate.yaml").read_text()


def result(label: str, score: Callable[[int, float], float], **changes: Any) -> Result:
    """Scores of two tasks, one of them without depths."""
    cells = [(n, d) for d in (0.05, 0.95) for n in LENGTHS]
    forced = [Cell(length=n, depth=d, score=score(n, d), samples=4) for n, d in cells]
    ranked = [Cell(length=n, depth=None, score=0.5, samples=4) for n in LENGTHS]
    values: dict[str, Any] = {
        "label": label,
        "lengths": LENGTHS,
        "loss_by_position": PositionLosses(
            edges=(0, 128, 1024),
            loss=(2.5, None),
            tokens=(9, 0),
            texts=(3, 0),
            standard_error=(0.25, None),
        ),
        "longppl": None,
        "tasks": {
            "passkey": TaskScores(scoring="forced", cells=tuple(forced)),
            "cwe": TaskScores(scoring="ranked", cells=tuple(ranked), note="<own> text"),
        },
        **{"seed": 1, "tokens": 5, "seconds": 2.0},
    }
    return Result(("reaches 64 tokens",), ContextScores(**values | changes))


@pytest.fixture
def both() -> list[Result]:
    return [result("base", lambda n, _: float(n < 200)), result("run <1>", lambda _, d: d)]


def test_the_table_has_models_side_by_side(both: list[Result]) -> None:
    said = table(both).splitlines()
    assert [line.split() for line in said[:5]] == [
        ["passkey,", "%", "base", "run", "<1>"],
        ["4", "samples", "each", "128", "1K", "128", "1K"],
        ["5", "%", "100", "0", "5", "5"],
        ["95", "%", "100", "0", "95", "95"],
        ["mean", "100", "0", "50", "50"],
    ]
    assert ["cwe", "50", "50", "50", "50"] in [line.split() for line in said]
    assert ["base", "3", "2.5000", "±0.2500", "-"] in [line.split() for line in said]
    assert "±: standard error of the mean over the texts" in said
    scores = both[0].scores.as_json()
    del scores["loss_by_position"]["texts"], scores["loss_by_position"]["standard_error"]
    older = ContextScores.from_json(scores).table().splitlines()  # of an earlier version
    assert ["base", "2.5000", "-"] in [line.split() for line in older]
    assert "base: reaches 64 tokens" in said
    assert "cwe: <own> text" in said


def test_the_picture_and_the_page_have_every_cell(
    both: list[Result], run: Run, tmp_path: Path
) -> None:
    (folder := tmp_path / "eval").mkdir()
    draw(both, folder / "scores.png")
    height, width, _ = imread(folder / "scores.png").shape
    assert 400 < height < 2000
    assert 400 < width < 2000
    models = [{"notes": each.notes, "scores": each.scores.as_json()} for each in both]
    (folder / "scores.json").write_text(json.dumps({"models": models}))
    assert read_result(folder / "scores.json") == both
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert run("report", tmp_path).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert f"<pre>{escape(table(both))}</pre>" in page
    assert b64encode((folder / "scores.png").read_bytes()).decode() in page
    (folder / "scores.json").write_text("{}")
    assert run("report", tmp_path).exit_code == 0
    assert "holds no scores" in (tmp_path / "report.html").read_text()
