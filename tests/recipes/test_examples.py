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

import pytest
from transformers import AutoModelForCausalLM

from longctx_patch.evaluation.tasks.make import make_samples
from longctx_patch.evaluation.tasks.passkey import QUESTION, TASK
from tests.plugin.launched import run_in_turn, run_launched

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_loop(*words: str) -> str:
    """What the example prints. It compares losses by itself, and exits with an error if they
    differ."""
    sys.argv = ["loop.py", *words]
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(EXAMPLES / "loop.py"), run_name="__main__")
    return said.getvalue()


def test_two_processes_train_as_one() -> None:
    for said, nothing in run_in_turn(2, (run_loop, []), (run_loop, ["--packed"])):
        assert "2 processes, losses" in said
        assert nothing == ""


def run_trainer_example(name: str, folder: str) -> str:
    os.chdir(folder)
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize("name", ["trainer.py", "sft.py"])
def test_a_trainer_of_two_processes_learns_and_saves(name: str, tmp_path: Path) -> None:
    said, _ = run_launched(run_trainer_example, 2, name, str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"'(?:eval_)?loss': '?([\d.]+)", said)]
    assert len(losses) == (11 if name == "trainer.py" else 10)
    assert losses[-1] < losses[0] - 0.3
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").num_parameters() > 0


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
