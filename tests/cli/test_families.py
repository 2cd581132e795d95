"""`longctx families` prints the table of support, and those of docs are its."""

import json
import subprocess
import sys
from pathlib import Path

from longctx_patch.hf.model.checks import FAMILIES, TABLE
from tests.cli.conftest import Run

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"


def test_every_family_has_a_line(run: Run) -> None:
    result = run("families")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split() == ["MODEL", "TYPE", "NAME", "SUPPORT"]
    assert [line.split()[0] for line in lines[1:]] == [family.model_type for family in TABLE]
    for line, family in zip(lines[1:], TABLE, strict=True):
        support = "yes" if family.refusal is None else f"no: {family.refusal}"
        assert f"{family.name} " in line
        assert f"  {support}" in line
    assert any(line.endswith("yes, sliding window, sinks, router loss") for line in lines)


def test_json_has_every_field(run: Run) -> None:
    rows = json.loads(run("families", "--json").output)
    assert [row["model_type"] for row in rows] == [family.model_type for family in TABLE]
    by_type = {row["model_type"]: row for row in rows}
    assert by_type["gemma2"] == {
        "model_type": "gemma2",
        "name": "Gemma 2",
        "features": ["sliding window", "softcap"],
        "logits": {
            "operation": "softcap",
            "holder": "config",
            "attribute": "final_logit_softcapping",
        },
        "refusal": None,
    }
    assert "recurrent state" in by_type["mamba"]["refusal"]
    assert {row["model_type"] for row in rows if row["refusal"] is None} == set(FAMILIES)


def test_the_reference_has_these_tables(run: Run) -> None:
    markdown = run("families", "--markdown").output
    assert markdown in PAGE.read_text(), "run `make docs`"
    for family in TABLE:
        assert f"`{family.model_type}`" in markdown


def test_json_and_markdown_at_once_is_wrong_usage(run: Run) -> None:
    result = run("families", "--json", "--markdown")
    assert result.exit_code == 2
    assert "choose one of them" in result.output


def test_it_needs_neither_torch_nor_transformers() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing one now raises ImportError
from longctx_patch.cli.main import main
main(["families"])
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
