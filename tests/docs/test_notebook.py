"""The notebook of examples/ runs, and what is committed with it is what its cells show."""

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.launching import run_module

NOTEBOOK = ROOT / "examples" / "long_context.ipynb"

Json = dict[str, Any]


def read(path: Path) -> Json:
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """The notebook after all cells ran in a new process; they assert results by themselves. It is
    not forked from what has imported bitsandbytes, which notebook_launcher refuses."""
    out = tmp_path_factory.mktemp("notebook") / "ran.ipynb"
    run_module(ROOT, "docs.make_notebook", str(out))
    return read(out)


def code(notebook: Json) -> list[Json]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(notebook: Json) -> str:
    """All that cells print, and the text of their last values."""
    outputs = [output for cell in code(notebook) for output in cell["outputs"]]
    texts = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    return "\n".join("".join(text) for text in texts)


def pictures(notebook: Json) -> list[bytes]:
    outputs = [output for cell in code(notebook) for output in cell["outputs"]]
    return [b64decode(o["data"]["image/png"]) for o in outputs if "image/png" in o.get("data", {})]


def words(text: str) -> list[str]:
    """Without numbers, whose last digits are those of a machine."""
    return re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "#", text).split()


def test_what_is_committed_is_what_the_cells_show(ran: Json) -> None:
    committed = read(NOTEBOOK)
    assert words(printed(committed)) == words(printed(ran)), "run: make notebook"
    assert [picture[:8] for picture in pictures(committed)] == [b"\x89PNG\r\n\x1a\n"]
    assert len(pictures(ran)) == 1


def test_every_parameter_is_compared_on_four_ranks(ran: Json) -> None:
    text = printed(ran)
    assert len(re.findall(r"\.weight +[\d.]+e-\d\d$", text, re.MULTILINE)) == 21
    assert "56 messages, 1376256 bytes, as planned" in text
    assert "\nequal to the stock model within 1e-05" in text


def test_two_processes_learn_as_one(ran: Json) -> None:
    rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+) +\S+$", printed(ran), re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(8))
    one, two = ([float(row[column]) for row in rows] for column in (1, 2))
    assert two == pytest.approx(one, rel=1e-5)
    assert two[-1] < two[0] - 0.3


def test_it_has_the_form_of_nbformat_4() -> None:
    notebook = read(NOTEBOOK)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w-]{1,64}", name) for name in names)
    both = {"execution_count", "outputs"}
    for cell in notebook["cells"]:
        own = both if cell["cell_type"] == "code" else set[str]()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | own
    assert [cell["execution_count"] for cell in code(notebook)] == [1, 2, 3, 4, 5, 6]


def test_links_of_the_notebook_lead_somewhere() -> None:
    texts = ["".join(cell["source"]) for cell in read(NOTEBOOK)["cells"]]
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(texts))
    assert len(links) >= 4
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []
