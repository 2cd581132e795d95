"""The page about a run: its numbers are those of the files, its texts are only texts."""

import json
import os
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.checkpoints.lock import held
from longctx_patch.cli.report import page
from longctx_patch.cli.report_data import read_run
from longctx_patch.recipes.metrics import MetricsFile
from longctx_patch.recipes.run_record import noting_failure, write_record
from tests.cli.conftest import Run


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, tables and curves."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.names: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open  # every element is closed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open[-1:] == ["td"] or self._open[-1:] == ["th"]:
            self.rows[-1][-1] += data
        if self._open[-2:] == ["polyline", "title"]:
            self.names.append(data)

    def lines(self) -> list[list[tuple[float, float]]]:
        """The points of every curve, on the paper."""
        curves = [str(attrs["points"]) for tag, attrs in self.tags if tag == "polyline"]
        pairs = [[point.split(",") for point in curve.split()] for curve in curves]
        return [[(float(x), float(y)) for x, y in curve[:-1]] for curve in pairs]


def line(step: int, **changes: float) -> dict[str, float]:
    values = {"loss": 5 - step / 7, "grad_norm": 1 / step, "learning_rate": 1e-4 * step}
    values |= {"tokens_per_second": 1000.0 + step, "peak_memory_bytes": (2 + step) * 2**30}
    return {"step": step, **values, **changes}


def write_metrics(folder: Path, lines: list[dict[str, float]], end: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(values) + "\n" for values in lines)
    (folder / "metrics.jsonl").write_text(text + end)


def write_plan(folder: Path, **content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(content))


def test_the_numbers_are_those_of_the_file(run: Run, tmp_path: Path) -> None:
    lines = [line(step) for step in range(1, 8)]
    write_metrics(tmp_path / "training", lines)
    write_plan(tmp_path, decided=[["degrees", "ulysses 2", "by the heads"]], memory_bytes=2**34)
    settings = {"processes": 2, "settings": {"max_steps": 7, "text": ["a", "b"]}}
    (tmp_path / "training/settings.json").write_text(json.dumps(settings))
    (tmp_path / "training/final").mkdir()
    (tmp_path / "training/final/adapter_config.json").write_text("{}")
    said = run("report", tmp_path)
    assert said.exit_code == 0
    assert "Finished: 7 steps" in said.output
    assert f", then longctx merge {tmp_path / 'training/final'}\n" in said.output
    assert f"longctx eval {tmp_path}" in said.output
    shown = Page((tmp_path / "report.html").read_text())
    data = read_run(tmp_path)
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_bytes"):
        assert data.series[name] == [(values["step"], values[name]) for values in lines]
    assert shown.names == ["loss", "learning_rate", "grad_norm", "tokens_per_second", "peak"]
    assert [len(curve) for curve in shown.lines()] == [7] * 5
    assert "peak 9 at the end" in shown.text
    assert "planned 16" in shown.text
    assert ["degrees", "ulysses 2", "by the heads"] in shown.rows
    assert ["max_steps", "7"] in shown.rows
    assert ["text", "a, b"] in shown.rows
    header = next(row for row in shown.rows if row[0] == "step")
    newest = dict(zip(header, shown.rows[shown.rows.index(header) + 1], strict=True))
    assert (newest["step"], newest["loss"]) == ("7", "4")
    # A falling loss falls on the paper, where y grows downwards, from edge to edge.
    curve = shown.lines()[0]
    assert [x for x, _ in curve] == sorted(x for x, _ in curve)
    assert [y for _, y in curve] == sorted(y for _, y in curve)
    assert (curve[0], curve[-1]) == ((62.0, 10.0), (452.0, 176.0))


def test_a_run_that_goes_on_has_an_incomplete_line(run: Run, tmp_path: Path) -> None:
    write_metrics(tmp_path, [line(1), line(2)], end='{"step": 3, "loss": 9')
    said = run("report", tmp_path, "--out", tmp_path / "page.html")
    assert re.search(r"Not finished: step 2, last written at \d{4}-.* it goes on", said.output)
    assert "metrics.jsonl: line 3 is incomplete and left out." in said.output
    assert "Next" not in said.output
    shown = Page((tmp_path / "page.html").read_text())
    assert len(shown.lines()[0]) == 2
    assert "line 3 is incomplete" in shown.text
    assert "goes on, or was interrupted" in shown.text


def test_how_a_run_ended(run: Run, tmp_path: Path) -> None:
    """An error that it noted, processes that are gone, one that lives, and what ranks left."""
    write_metrics(tmp_path, [line(1), line(2)])
    write_record(tmp_path, {"max_steps": 9}, 2)
    with pytest.raises(ValueError, match="NaN"), noting_failure(tmp_path):
        raise ValueError("step 3: the loss is NaN")
    with pytest.raises(KeyError), noting_failure(tmp_path):  # a later one, of another process
        raise KeyError
    said = run("report", tmp_path).output
    assert re.search(r"Failed after step 2 of 9: step 3: the loss is NaN \(rank 0, \d{4}-", said)
    write_record(tmp_path, {"max_steps": 9}, 2)  # it was started again
    assert run("report", tmp_path).output.startswith("Not finished: step 2 of 9")

    gone = {"host": socket.gethostname(), "pid": 2**22 + 1, "launched": 1.0}
    (tmp_path / ".lock").write_text(json.dumps(gone))
    assert (
        "Interrupted after step 2 of 9: its processes were ended" in run("report", tmp_path).output
    )
    with held(tmp_path, launched=1.0, say=print):
        said = run("report", tmp_path).output
    assert f"Goes on: step 2 of 9; process {os.getpid()} on " in said
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank_1.json").write_text('{"rank": 1, "reason": "waits for rank 0"}')
    assert "flight record of rank 1: waits for rank 0" in run("report", tmp_path).output


def test_a_run_without_steps_shows_what_was_decided(run: Run, tmp_path: Path) -> None:
    refused = run("report", tmp_path)
    assert refused.exit_code == 1
    assert "no metrics.jsonl, trainer_state.json or finetune.yaml in it" in refused.output
    (tmp_path / "finetune.yaml").write_text("max_steps: 9\nring: 2\nlora: false\nfull: false\n")
    write_plan(tmp_path, decided=[["rope", "yarn", "factor 4"]], memory_bytes=None)
    assert run("report", tmp_path).output.startswith("No step yet")
    shown = Page((tmp_path / "report.html").read_text())
    assert ["rope", "yarn", "factor 4"] in shown.rows
    assert ["max_steps", "9"] in shown.rows
    assert ["lora", "True"] in shown.rows  # where neither was asked for
    assert not shown.lines()
    (tmp_path / "training").mkdir()
    write_metrics(tmp_path / "training", [])
    used = {"max_steps": 9, "ring": 4, "full": True, "text": "no\udcff"}
    write_record(tmp_path / "training", used, 4)
    said = run("report", tmp_path).output
    assert said.startswith("No step yet")
    changed = "had decided: ring 4 (was 2), full True (was False)."
    assert changed in said
    html = (tmp_path / "report.html").read_text()
    assert changed in html
    assert r"no\udcff" in html  # a path of data that is no UTF-8


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    """And the page asks nothing of other places."""
    folder, text = tmp_path / "<b>run & co", "'\"&</td></table><script>alert(1)</script><!--"
    write_metrics(folder / "training", [line(1), line(2, loss=text)])  # type: ignore[arg-type]
    write_plan(folder, decided=[[text, text, text]], memory_bytes=None)
    content = {"settings": {text: text, "list": [text]}}
    (folder / "training/settings.json").write_text(json.dumps(content))
    shown = Page(html := page(read_run(folder)))
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in shown.tags}
    assert not {"src", "href", "onload"} & {name for _, attrs in shown.tags for name in attrs}
    assert not {"url(", "@import"} & set(re.findall(r"url\(|@import", html))
    assert [text, text, text] in shown.rows
    assert [text, text] in shown.rows
    assert ["list", text] in shown.rows
    assert "Run <b>run & co" in shown.text
    assert f"loss of step 2 is {text}" in shown.text
    assert sum(tag == "table" for tag, _ in shown.tags) == 3


def test_skipped_steps_and_what_was_not_finite_are_named(tmp_path: Path) -> None:
    """As the recipes write them."""
    file = MetricsFile(tmp_path, writes=True, first_step=0)
    file.write(**line(1))
    file.write(**line(2, loss=float("nan")), skipped="the loss is nan")
    file.write(**line(3), slow_ranks="SLOW GPU: rank 1, 30%")
    file.write(step=26, slow_ranks="SLOW GPU: rank 1, 20%")  # as beside a trainer
    with (tmp_path / "metrics.jsonl").open("a") as more:
        more.write(json.dumps(line(27, loss=float("inf"))) + "\n")
    data = read_run(tmp_path)
    assert "loss of step 27 is inf, which is not drawn." in data.notes
    assert [*data.notes[:2], data.notes[-1]] == [
        "Step 2 was skipped: the loss is nan.",
        "loss of step 2 is nan, not drawn.",
        "Seen 2 times, in steps 3 to 26: SLOW GPU: rank 1, 20%.",
    ]
    assert [step for step, _ in data.series["loss"]] == [1, 3]


def test_a_trainers_history_has_its_evaluations(tmp_path: Path) -> None:
    """The newest trainer_state.json counts; a run that goes on has them in checkpoints only."""
    history = [
        {"loss": 3.0, "grad_norm": 0.5, "learning_rate": 1e-4, "epoch": 0.5, "step": 5},
        {"eval_loss": 2.75, "eval_runtime": 1.0, "epoch": 0.5, "step": 5},
        {"loss": 2.5, "grad_norm": 0.25, "learning_rate": 0.0, "epoch": 1.0, "step": 10},
        {"eval_loss": 2.25, "eval_runtime": 1.0, "epoch": 1.0, "step": 10},
        {"train_runtime": 9.0, "train_loss": 2.75, "step": 10},
    ]
    for step, count in ((5, 2), (10, 5)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"global_step": step, "max_steps": 20, "log_history": history[:count]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    data = read_run(tmp_path)
    assert data.state.startswith("Not finished: step 10 of 20")
    shown = Page(page(data))
    assert data.series["loss"] == [(5, 3.0), (10, 2.5)]
    assert data.series["eval_loss"] == [(5, 2.75), (10, 2.25)]
    assert len(shown.lines()) == 4  # two of them share the axes of the loss


def test_where_rows_get_longer_is_drawn(tmp_path: Path) -> None:
    lengths = (16, 16, 16, 64, 64)
    write_metrics(tmp_path, [line(n, seq_len=size) for n, size in enumerate(lengths, start=1)])
    data = read_run(tmp_path)
    assert data.lengths == [(1, 16), (4, 64)]
    found = Page(page(data))
    assert (
        "Loss: loss 4.28571 at the end; rows of 16 from step 1; rows of 64 from step 4"
        in found.text
    )
    dotted = [attrs for tag, attrs in found.tags if attrs.get("stroke-dasharray") == "1 3"]
    across = {tag["x1"] for tag in dotted}
    assert across == {str(found.lines()[0][place][0]) for place in (0, 3)}
    write_metrics(tmp_path, [line(n, seq_len=16) for n in (1, 2)])
    assert read_run(tmp_path).lengths == []


def test_what_has_written_nothing_notes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="refused"), noting_failure(tmp_path / "out"):
        raise ValueError("refused")
    assert not (tmp_path / "out").exists()
