"""What `make site` adds to mkdocs: what pages link to outside of docs/ is on the site too.

README is the landing page, every other Markdown file is a page, a source file a page that shows it,
a folder the list of its sources, and any other file a download. Each is found under its path in the
repository, but what lies in docs/ without that folder's name.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OWN = (".md", ".png")
"""What mkdocs itself takes from docs/."""
CODE = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml"}
FENCE = re.compile(r"(^(`{3,}).*?^\2$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"""(?:(?<=\]\()|(?<=src="))(?!\w+:|#)[^)"#\s]+""")
FOREIGN_PICTURE = re.compile(r"^!\[.*\]\(https?:.*\)\n", re.MULTILINE)
LIST_AFTER_TEXT = re.compile(r"^(?![-*] |\s)(.+\n)(?=[-*] )", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Replaces the README of docs/ by the project's, and adds what else pages link to."""
    from mkdocs.structure.files import File, InclusionLevel  # installed by `make site` alone

    files.remove(files.get_file_from_path("README.md"))
    for path in linked():
        level = InclusionLevel.INCLUDED if path.suffix == ".md" else InclusionLevel.NOT_IN_NAV
        text = page_of(path)
        made = {"abs_src_path": str(path)} if text is None else {"content": for_site(text, path)}
        files.append(File.generated(config, site_path(path), inclusion=level, **made))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the text of a page of docs/ for mkdocs; `on_files` did this with the others."""
    return markdown if page.file.generated_by else for_site(markdown, DOCS / page.file.src_uri)


def site_path(path: Path) -> str:
    """Where the site has a file or folder of the repository."""
    uri = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
    return f"{uri}.md" if path.is_dir() or path.suffix in CODE else uri


def page_of(path: Path) -> str | None:
    """Returns the page that is made of a file or folder, with links as they are in the repository;
    None for a download."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    top = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        sources = sorted(inside.name for inside in path.iterdir() if inside.suffix in CODE)
        return top + "\n".join(f"- [{name}]({path.name}/{name})" for name in sources)
    if language := CODE.get(path.suffix):
        return f"{top}``````{language}\n{path.read_text(encoding='utf-8')}\n``````\n"
    return None


def linked() -> list[Path]:
    """Returns README and all that can be reached from it and docs/, but for what is `OWN`."""
    found, new = set[Path](), {ROOT / "README.md", *DOCS.rglob("*.md")}
    while new:
        found |= new
        new = {target for path in new for target in targets(path) if target.exists()} - found
    return sorted(path for path in found if DOCS not in path.parents or path.suffix not in OWN)


def targets(path: Path) -> Iterator[Path]:
    """Yields the files and folders to which the page of a file or folder links."""
    for link in LINK.findall(FENCE.sub("", page_of(path) or "")):
        yield (path.parent / link).resolve()


def for_site(text: str, path: Path) -> str:
    """Returns a page with the site's links, without pictures from the internet (badges), and with
    the empty line that mkdocs needs before a list where GitHub needs none."""

    def moved(link: re.Match[str]) -> str:
        target = site_path((path.parent / link[0]).resolve())
        return posixpath.relpath(target, posixpath.dirname(site_path(path)) or ".")

    def changed(prose: str) -> str:
        return LIST_AFTER_TEXT.sub(r"\1\n", LINK.sub(moved, FOREIGN_PICTURE.sub("", prose)))

    parts = FENCE.split(text)  # text, block of code, its marks, text, ...
    del parts[2::3]
    parts[::2] = map(changed, parts[::2])
    return "".join(parts)
