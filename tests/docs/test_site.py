"""The site of `make site`, without mkdocs: its pages are those of mkdocs.yml, its links exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.mkdocs_hook import DOCS, for_site, linked, page_of, site_path, targets
from tests.docs.pages import ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
OUTSIDE = linked()


def pages_of(nav: Any) -> Iterator[str]:
    """Every page of the navigation, from its nested lists of titles."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def test_the_navigation_has_every_page_once() -> None:
    pages = [*DOCS.rglob("*.md"), *(path for path in OUTSIDE if path.suffix == ".md")]
    assert sorted(pages_of(CONFIG["nav"])) == sorted({site_path(path) for path in pages})


def test_what_pages_show_and_link_to_exists() -> None:
    for path in (*OUTSIDE, *DOCS.rglob("*.md")):
        assert [target for target in targets(path) if not target.exists()] == [], path


def test_nothing_is_loaded_from_the_internet() -> None:
    assert CONFIG["theme"]["font"] is False
    assert not re.search("https?://", (ROOT / "mkdocs.yml").read_text())


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("README.md", "[a](docs/how-to/pack.md#b)", "[a](how-to/pack.md#b)"),
        ("README.md", '<img src="docs/results/a.png">', '<img src="results/a.png">'),
        ("README.md", "[a](CONTRIBUTING.md)", "[a](CONTRIBUTING.md)"),
        ("docs/how-to/pack.md", "[a](../../README.md)", "[a](../README.md)"),
        ("docs/how-to/pack.md", "[a](extend.md)", "[a](extend.md)"),
        ("docs/how-to/pack.md", "[a](../../examples/loop.py)", "[a](../examples/loop.py.md)"),
        ("docs/how-to/pack.md", "[a](../../recipes/accelerate)", "[a](../recipes/accelerate.md)"),
        ("docs/how-to/pack.md", "[a](https://b.c/d.md)", "[a](https://b.c/d.md)"),
        ("docs/how-to/pack.md", "[a](#b)", "[a](#b)"),
        ("README.md", "```\n[a](docs/b.md)\n- c\n```", "```\n[a](docs/b.md)\n- c\n```"),
        ("README.md", "``````\n```\n[a](b.md)\n``````", "``````\n```\n[a](b.md)\n``````"),
        ("README.md", "![a](https://b.c/d)\n![e](docs/f.png)\ng", "![e](f.png)\ng"),
        ("README.md", "text\n- a\n  b\n- c", "text\n\n- a\n  b\n- c"),
    ],
)
def test_a_page_for_the_site(page: str, text: str, expected: str) -> None:
    assert for_site(text, ROOT / page) == expected


def test_sources_are_shown_and_folders_listed() -> None:
    code = page_of(ROOT / "examples" / "loop.py")
    assert code is not None
    assert (ROOT / "examples" / "loop.py").read_text() in for_site(code, ROOT / "examples/loop.py")
    folder = page_of(ROOT / "recipes" / "accelerate") or ""
    names = {path.name for path in Path(ROOT, "recipes", "accelerate").glob("*.yaml")}
    assert set(re.findall(r"\(accelerate/(.+?)\)", folder)) == names
    assert page_of(ROOT / "examples" / "long_context.ipynb") is None
