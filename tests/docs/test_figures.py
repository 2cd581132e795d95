"""Every measured number in README and the guides is bound to what was measured."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.predict.run.cluster import GIB
from tests.docs.pages import PAGES, ROOT, name_of, prose
from tests.predict.run.measured import AFTERWARDS

FIGURES = tomllib.loads((ROOT / "docs" / "results" / "figures.toml").read_text())
UNITS = re.compile(
    r"\d[\d,]*(?:\.\d+)?(?: (?:tokens/s|GiB|ms|s|TFLOP/s|times as fast)\b| %)"  # as in 2.5 GiB
)
GUIDES = [page for page in PAGES if re.match(r"README|docs/(how-to|tutorial)", name_of(page))]
GUIDES += [ROOT / "docs" / "explanation" / "memory.md"]


def flat(text: str) -> str:
    return " ".join(text.replace("\\\n", " ").split())


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.parametrize("run", FIGURES["run"], ids=lambda run: run["what"])
def test_figures_are_those_of_the_results_page(run: dict[str, Any]) -> None:
    page, lines = flat((ROOT / run["source"]).read_text()), run["lines"]
    assert run["hardware"]
    assert run["date"]
    assert [text for text in (run["command"], *lines) if flat(text) not in page] == []
    measured = numbers(" | ".join(lines))
    assert [quote for quote in run.get("quotes", ()) if numbers(quote)[0] not in measured] == []
    for quote, (ours, theirs) in run.get("ratios", {}).items():
        assert {ours, theirs} <= set(measured)
        assert round(ours / theirs, 2) == numbers(quote)[0]


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_guides_quote_nothing_else(page: Path) -> None:
    bound = {*FIGURES["planner"].values(), *FIGURES["bounds"]}
    bound.update(*(run.get(key, ()) for run in FIGURES["run"] for key in ("quotes", "ratios")))
    assert set(UNITS.findall(flat(prose(page)))) <= bound


def test_every_row_of_readmes_table_is_measured() -> None:
    table = r"^\| (\d[\d,]+) \| .+ \| ([\d,]+) \| ([\d.]+) \|$"
    rows = re.findall(table, (ROOT / "README.md").read_text(), re.MULTILINE)
    lines = [line for run in FIGURES["run"] for line in run["lines"]]
    assert len(rows) >= 5
    for row in rows:
        assert any(all(f"| {cell} |" in line for cell in row) for line in lines), row


def test_the_planner_is_as_near_as_pages_say() -> None:
    predicted = [(row, row.predicted()) for row in AFTERWARDS]
    errors = {
        "peak": [p.memory.total / GIB / row.peak_gib for row, p in predicted],
        "seconds": [p.time.total / row.seconds for row, p in predicted],
        "host": [p.host_bytes / GIB / row.host_gib for row, p in predicted if row.host_gib],
    }
    worst = {k: f"{max(abs(e - 1) for e in found):.1%}" for k, found in errors.items()}
    said = FIGURES["planner"]
    assert worst == {name: said[name].replace(" ", "") for name in errors}
    assert said["runs"] == f"{len(AFTERWARDS)} runs"
