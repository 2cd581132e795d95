"""`longctx data` shows the rows that a run trains on."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from longctx_patch.cli.data_report import packing_of
from longctx_patch.cli.main import main as longctx
from tests.recipes.test_trl_recipes import job, patch, write
from tests.trl.cases import rows

__all__ = ["job"]  # a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of TRL's own defaults
    pytest.mark.usefixtures("forgets_accelerate"),
]


def data(*words: str) -> Result:
    return CliRunner().invoke(longctx, ["data", *words], color=True)


def test_what_a_chat_run_will_see(job: Path) -> None:
    patch(job, "--data", str(job / "chats.jsonl"), "--eval-data", str(job / "held_out.jsonl"))
    found = data(str(job / "run"), "--color", "--rows", "12")
    assert found.exit_code == 0, found.output
    chats = rows("chat", 12, 1)
    answers = [m["content"] for c in chats for m in c["messages"] if m["role"] == "assistant"]
    num_learned = sum(len(answer.split()) + 1 for answer in answers)
    assert re.search(rf"rows +12 .*learned +{num_learned} ", found.output.replace("\n", " "))
    green = re.findall(r"\x1b\[32m(.*?)\x1b\[0m", found.output)
    assert sorted(green) == sorted(f"{answer} <eos>" for answer in answers)
    assert f"-m longctx_patch.recipes.sft --config {job}/run/sft.yaml" in found.output
    plain = data(str(job / "run" / "sft.yaml"), "--no-color", "--rows", "0")
    assert "\x1b" not in plain.output
    assert "\nrow " not in plain.output


def test_cut_and_packed_rows(job: Path) -> None:
    patch(job, "--data", str(job / "texts.jsonl"), "--sft", "--pack")
    settings = job / "run" / "sft.yaml"
    settings.write_text(settings.read_text().replace("too_long: refuse", "too_long: cut"))
    settings.write_text(settings.read_text().replace("seq_len: 96", "seq_len: 20"))
    settings.write_text(settings.read_text().replace("rope: linear", "rope: none"))
    found = data(str(job / "run"))
    lengths = np.array([len(text["text"].split()) + 1 for text in rows("text", 8, 4)])
    num_cut = int((lengths - 20).clip(min=0).sum())
    assert num_cut
    assert re.search(rf"cut off +{num_cut} +of {(lengths > 20).sum()} rows", found.output)
    packed, fill = packing_of(lengths.clip(max=20), 20)
    assert re.search(rf"packed +{packed} +rows, {fill:.1%} full", found.output)


def test_pairs(job: Path) -> None:
    patch(job, "--data", str(job / "pairs.jsonl"), "--dpo")
    found = data(str(job / "run"), "--rows", "1", "--no-color")
    (place,) = re.findall(r"row (\d)", found.output)
    pair: dict[str, Any] = rows("pairs", 8, 3)[int(place)]
    assert f"{pair['prompt']}\nchosen: {pair['chosen'].strip()} <eos>\nrejected: " in found.output


def test_what_can_not_be_shown(job: Path) -> None:
    patch(job, "--data", str(job / "texts.jsonl"))
    found = data(str(job / "run"))
    assert found.exit_code == 1
    assert "has no sft.yaml or dpo.yaml. finetune.yaml is for plain text" in found.output
    chats = write(job / "more.jsonl", [*rows("chat", 30, 1), {"text": "w1"}])
    (job / "run").rename(job / "before")
    patch(job, "--data", str(chats))
    found = data(str(job / "run"))
    assert found.exit_code == 1
    assert "more.jsonl, line 31: a record with a field of text, among those with" in found.output
