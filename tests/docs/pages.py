"""The pages of README and docs, and what stands in them."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """Code blocks of one language ("" for commands and output)."""
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def prose(page: Path) -> str:
    """The text without code blocks."""
    return FENCE.sub("", page.read_text())


def code(page: Path) -> Iterator[str]:
    """Code outside of Python blocks: spans, and lines of commands."""
    yield from re.findall(r"`([^`\n]+)`", prose(page))
    for block in blocks(page, ""):
        yield from re.sub(r"\\\n\s*", " ", block).splitlines()


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
