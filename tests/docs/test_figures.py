"""Every measured number in README and the guides comes from a recorded measurement."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, name_of, prose
from tests.planner.measured import accuracy

FIGURES = tomllib.loads((ROOT / "docs" / "results" / "figures.toml").read_text())
UNITS = re.compile(
    r"\d[\d,]*(?:\.\d+)?(?: (?:tokens/s|GiB|ms|s|TFLOP/s|times as fast)\b| %)"  # as in 2.5 GiB
)
GUIDES = [page for page in PAGES if re.match(r"README|docs/(how-to|tutorial)", name_of(page))]
GUIDES += [ROOT / "docs" / "explanation" / "memory.md"]
PREDICTED = "docs/how-to/one-24gb-card.md"
"""Its numbers are the planner's: test_models.py computes them."""


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


@pytest.mark.parametrize("page", [p for p in GUIDES if name_of(p) != PREDICTED], ids=name_of)
def test_guides_quote_nothing_else(page: Path) -> None:
    near = accuracy()
    bound = {f"{share:g} %" for share in (near.peak, near.seconds, near.host)}
    bound.update(FIGURES["bounds"])
    bound.update(*(run.get(key, ()) for run in FIGURES["run"] for key in ("quotes", "ratios")))
    assert set(UNITS.findall(flat(prose(page)))) <= bound


def test_every_row_of_readmes_table_is_measured() -> None:
    table = r"^\| (\d[\d,]+) \| .+ \| ([\d,]+) \| ([\d.]+) \|$"
    rows = re.findall(table, (ROOT / "README.md").read_text(), re.MULTILINE)
    lines = [line for run in FIGURES["run"] for line in run["lines"]]
    assert len(rows) >= 5
    for row in rows:
        assert any(all(f"| {cell} |" in line for cell in row) for line in lines), row
