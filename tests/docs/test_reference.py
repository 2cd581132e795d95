"""The generated pages are up to date, and the scripts in README and guides run."""

import re
import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.docs.pages import PAGES, ROOT, blocks, name_of
from tests.plugin.launched import run_launched
from tests.tiny_llama import TINY_LLAMA

HUB = "Qwen/Qwen3-0.6B"
SHORT = [
    pytest.param(text, id=f"{name_of(page)}-{number}")
    for page in PAGES
    for number, text in enumerate(blocks(page, "python"))
    if name_of(page).startswith("docs") and not re.search(f"from_pretrained|{HUB}", text)
]


def test_reference_is_what_the_code_says() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["pages"]()
    folder = ROOT / "docs" / "reference"
    old = [name for name, text in pages.items() if (folder / name).read_text() != text]
    assert old == [], "run `make docs`"


@pytest.mark.parametrize("text", SHORT)
def test_what_needs_no_hub_runs(text: str) -> None:
    exec(compile(text, "page", "exec"), {"__name__": "page"})


def run_script(text: str) -> str:
    """What a script prints."""
    with redirect_stdout(StringIO()) as said:
        exec(compile(text, "script", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def test_readmes_script_gives_the_loss_of_one_process(tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "README.md", "python")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA | {"max_position_embeddings": 128}))
    model.save_pretrained(tmp_path / "model")
    row = torch.arange(100)[None]
    with torch.no_grad():
        alone = model(input_ids=row, labels=row).loss.item()
    assert HUB in script
    said = run_launched(run_script, 2, script.replace(HUB, str(tmp_path / "model")))
    losses = [float(loss) for loss in re.findall(r"^\d\.\d+$", "\n".join(said), re.MULTILINE)]
    assert losses[0] == pytest.approx(alone, rel=1e-6)
    assert losses[2] < losses[1] < losses[0]
