"""The generated pages are up to date, and what guides show runs."""

import re
import runpy

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, name_of

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
