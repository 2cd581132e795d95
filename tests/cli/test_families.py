"""`longctx families` prints the table of support, and the docs have the same table."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx_patch.families.supported import REFUSED, TABLE
from tests.cli.conftest import Run

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"


def test_every_family_has_a_line(run: Run) -> None:
    result = run("families")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split() == ["MODEL", "TYPE", "NAME", "SUPPORT"]
    types = [*(family.model_type for family in TABLE), *REFUSED]
    assert [line.split()[0] for line in lines[1:]] == types
    assert all(
        f"  no: {REFUSED[name]}" in line
        for name, line in zip(types, lines[1:], strict=True)
        if name in REFUSED
    )
    assert any(line.endswith("yes, sliding window, sinks, router loss") for line in lines)


def test_json_has_every_field_and_the_reference_these_tables(run: Run) -> None:
    rows = json.loads(run("families", "--json").output)
    assert [row["model_type"] for row in rows] == [*(f.model_type for f in TABLE), *REFUSED]
    gemma_2 = next(row for row in rows if row["model_type"] == "gemma2")
    assert gemma_2.keys() == {"model_type", "name", "features", "logits", "refusal"}
    assert (gemma_2["features"], gemma_2["refusal"]) == (["sliding window", "softcap"], None)
    assert run("families", "--markdown").output in PAGE.read_text(), "run `make docs`"
    result = run("families", "--json", "--markdown")
    assert result.exit_code == 2
    assert "choose one of them" in result.output


@pytest.mark.parametrize(
    ("model", "code", "parts"),
    [
        ("qwen3", 0, ["yes: qwen3 (Qwen3), with sliding window", "Next: longctx patch MODEL"]),
        ("qwen2.5", 0, ["yes: qwen2 (Qwen2, Qwen2.5)"]),
        ("qwen2_vl", 0, ["`longctx patch` trains its text model"]),
        (
            "gpt2",
            1,
            ["no: gpt2: its learned positions end", "What to do: train it without"],
        ),
        ("bert", 1, ["no: 'bert' is no path, and no model_type", "What to do: train it without"]),
        ("qwen33", 1, ["no model_type in the table. Did you mean 'qwen3'?"]),
    ],
)
def test_one_model_is_a_yes_or_a_no(run: Run, model: str, code: int, parts: list[str]) -> None:
    result = run("families", model)
    assert result.exit_code == code
    assert all(part in result.output for part in parts)


def test_a_folder_is_judged_by_its_config(run: Run, config: Callable[..., Path]) -> None:
    folder = config().parent
    result = run("families", folder)
    assert result.exit_code == 0
    assert f"Next: longctx patch {folder / 'config.json'} --seq-len 64 " in result.output
    result = run("families", config(attention_dropout=0.1))
    assert result.exit_code == 1
    assert "no: this Llama 1 to 3 model can't be patched" in result.output
    assert "Load the model with attention_dropout=0.0" in result.output
    assert run("families", folder, "--json").exit_code == 2


def test_it_needs_neither_torch_nor_transformers() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing one now raises ImportError
from longctx_patch.cli.main import main
main(["families"], standalone_mode=False)
main(["families", "llama"], standalone_mode=False)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
