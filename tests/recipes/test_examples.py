"""The examples run as their docstrings say; `make demo` runs the long one."""

import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import Trainer
from trl import DPOTrainer, GRPOTrainer, SFTTrainer

from longctx_patch.evaluation.tasks.make import make_samples
from longctx_patch.evaluation.tasks.passkey import QUESTION, TASK
from tests.plugin.launched import run_in_turn, run_launched

EXAMPLES = Path(__file__).parents[2] / "examples"
LEARNED: dict[str, tuple[type[Trainer], str, float]] = {
    "trainer.py": (Trainer, "loss", -0.3),
    "extend.py": (Trainer, "loss", -2.0),
    "sft.py": (SFTTrainer, "loss", -1.0),
    "dpo.py": (DPOTrainer, "rewards/margins", 1.0),
    "grpo.py": (GRPOTrainer, "reward", 0.2),
}
"""The stock trainer of each example, a number that it logs, and how much this changes at least."""
Log = list[dict[str, float]]


def run_loop() -> list[str]:
    """What the example prints. It compares its first loss by itself, and exits with an error if
    this is another one."""
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(EXAMPLES / "loop.py"), run_name="__main__")
    return said.getvalue().splitlines()


def test_a_loop_of_two_processes_learns() -> None:
    (documents, *losses), nothing = run_launched(run_loop, 2)
    assert documents == "20 documents, rows 96.4% full"
    first, *_, last = (float(line.removeprefix("loss ")) for line in losses)
    assert last < first - 0.3
    assert nothing == []


def run_trainer(name: str, folder: Path, is_stock: bool) -> Log:
    """What the trainer of an example logs. The stock one, without our two lines, does one step."""
    os.chdir(folder)
    text = (EXAMPLES / name).read_text()
    names: dict[str, Any] = {"Trainer": Trainer}
    if is_stock:
        text = re.sub(r"max_steps=\d+", "max_steps=1", text)
    if is_stock and name == "extend.py":  # it evaluates through the handle
        text = text.replace("ring_degree=2, ", "")
    elif is_stock:
        text, removed = re.subn(r"\n +long_context=.*", "", text)
        ours = r"(?<=\()LongContextTrainerMixin, |(?<== )LongContext(?=Trainer\()"
        text, changed = re.subn(ours, "", text)
        assert (removed, changed) == (1, 1)
    with redirect_stdout(StringIO()):
        exec(compile(text, name, "exec"), names)
    trainer = names["trainer"]
    assert isinstance(trainer, LEARNED[name][0])
    if name == "extend.py" and not is_stock:
        before, after = (names[when].loss_by_position.loss for when in ("before", "after"))
        assert all(later < earlier - 3 for earlier, later in zip(before, after, strict=True))
    return [*trainer.state.log_history]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name[:-3]) for name in LEARNED}


@pytest.fixture(scope="module")
def on_two(outputs: dict[str, Path]) -> dict[str, Log]:
    jobs = [(run_trainer, [name, folder, False]) for name, folder in outputs.items()]
    return {name: log for name, (log, _) in zip(LEARNED, run_in_turn(2, *jobs), strict=True)}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Log]:
    folder = tmp_path_factory.mktemp("stock")
    jobs = [(run_trainer, [name, folder, True]) for name in LEARNED]
    return {name: log for name, (log,) in zip(LEARNED, run_in_turn(1, *jobs), strict=True)}


@pytest.mark.parametrize("name", LEARNED)
def test_a_trainer_of_two_processes_begins_as_the_stock_one_and_learns(
    name: str, on_two: dict[str, Log], stock: dict[str, Log], outputs: dict[str, Path]
) -> None:
    _, number, change = LEARNED[name]
    first, *_, last = (log for log in on_two[name] if "grad_norm" in log)
    for each in ("loss", "grad_norm", number):
        assert first[each] == pytest.approx(stock[name][0][each], rel=1e-5, abs=1e-7), each
    assert (last[number] - first[number]) / change >= 1
    (weights,) = (outputs[name] / "run").glob("*.safetensors")
    assert weights.stat().st_size > 20_000


def test_the_table_has_what_each_example_says_first() -> None:
    row = re.compile(r"^\| \[([\w.]+)\]\(\1\) \| (.+) \| (.+) \|$", re.MULTILINE)
    table = row.findall((EXAMPLES / "README.md").read_text())
    assert {name for name, *_ in table} == {*os.listdir(EXAMPLES)} - {"README.md", "__pycache__"}
    for name, learned, start in table:
        text = (EXAMPLES / name).read_text()
        if name == "demo.py":
            continue  # it is a check, not to be copied
        assert f"Learn how to {learned}" in text, name
        if not name.endswith(".ipynb"):
            lines = text.splitlines()
            assert len(lines) <= 80
            assert f"Learn how to {learned}." in "".join(lines[:2])
            assert f"    {start.strip('`')}" in text


def test_the_page_has_the_trainers_script() -> None:
    page = (EXAMPLES.parent / "docs" / "how-to" / "trainers.md").read_text()
    _, script = (EXAMPLES / "trainer.py").read_text().split('"""\n\n')
    assert f"```python\n{script}```\n" in page


def test_masks_are_dense_attention_and_send_less(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "masks.py"), run_name="__main__")  # it compares by itself
    found = re.findall(r"^(.+?) +\d+ pairs, +(\d+) bytes", capsys.readouterr().out, re.MULTILINE)
    sent = {name: int(num_bytes) for name, num_bytes in found}
    assert list(sent) == ["causal", "window", "block-sparse", "documents", "sinks, softcap"]
    assert sent["block-sparse"] < sent["window"] < sent["documents"] < sent["causal"]
    assert sent["sinks, softcap"] == sent["causal"]


def test_the_demo_trains_on_other_keys_than_it_asks_for() -> None:
    demo = runpy.run_path(str(EXAMPLES / "demo.py"), run_name="demo")
    tokenizer = demo["word_tokenizer"]()
    random = Random(0)
    keys = demo["free_keys"](tokenizer, random)
    for least, most, questions, _ in demo["TEXTS"].values():
        for size in (least, most):
            key = next(keys)
            text = demo["hidden_key"](size, questions, key, random)
            assert {*re.findall(r"\d+", text)} == {key}
            assert text.endswith(f"{QUESTION} {key}")
            ids = tokenizer(text).input_ids
            assert (len(ids), tokenizer.decode(ids)) == (size, text)
            assert tokenizer.pad_token_id not in ids  # stands for what is no token
    depths = [depth / 100 for depth in demo["DEPTHS"]]
    samples = make_samples([TASK], tokenizer, 2048, demo["SAMPLES"], depths=depths)
    asked = {tokenizer.decode(each.answers[0]).strip() for each in samples}
    assert len(asked) == len(samples)
    assert asked.isdisjoint(islice(keys, 200_000))


def test_the_demo_leaves_a_folder_with_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["demo.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "demo: ok" not in said.out
    assert "holds files" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
