"""Commands, options, names, paths, links and errors in README and docs exist."""

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterable
from pathlib import Path

import click
import pytest

import longctx_patch
import tests.docs.pages as pages
from longctx_patch.cli.main import main as longctx
from longctx_patch.kernels import available
from longctx_patch.memory.policies import POLICIES
from longctx_patch.plans.generators.table import PLANS
from longctx_patch.recipes.settings import FIELD_TYPES
from longctx_patch.rules.versions import REQUIRED
from tests.docs.pages import PAGES, ROOT, name_of
from tests.test_layering import IMPORTS, MODULES, PACKAGE

MOST_LINES = 150
OTHER_PROGRAMS = {
    *("--config_file", "--machine_rank", "--main_process_ip", "--main_process_port", "--settings"),
    *("--config", "--standalone", "--nproc_per_node", "--no-build-isolation"),
    *("--nnodes", "--node_rank", "--master_addr", "--master_port", "--rdzv_conf"),
    *("--gpus-per-node", "--max-model-len", "--push_to_hub", "--hub_model_id"),
    *("--enable-lora", "--lora-modules", "--hf-overrides"),
}
"""Options of accelerate, torchrun, pip, Slurm, vLLM, Trainer, and the recipes' for their files."""
by_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@functools.cache
def options_of(command: str) -> set[str]:
    """Options of one `longctx` command; for "" all options that pages may name."""
    assert isinstance(longctx, click.Group)
    negated = {f"no_{name}" for name, kind in FIELD_TYPES.items() if kind is bool}
    recipe = {f"--{name}" for name in (*FIELD_TYPES, *negated)}
    recipe |= {name.replace("_", "-") for name in recipe}
    if command:
        parameters = longctx.commands[command].params
        ours = {option for p in parameters for option in (*p.opts, *p.secondary_opts)}
        return ours | recipe if command == "train" else ours
    scripts = " ".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    found = recipe | OTHER_PROGRAMS | set(re.findall(r'"(--[\w-]+)"', scripts))
    found |= {"--no-floor", "--num-layers"}
    return found.union(*map(options_of, longctx.commands))


def test_readme_is_short_and_its_badges_are_true() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    for name in ("torch", "transformers"):
        assert f"![{name} {' to '.join(REQUIRED[name])}](" in text


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", pages.prose(page)):
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{target}: no such file"
        assert not anchor or anchor in pages.anchors(other), f"{target}: no such heading"


@by_page
def test_commands_options_and_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    assert isinstance(longctx, click.Group)
    for text in pages.code(page):
        ours = re.match(r"longctx ([a-z]+)(?: |$)", text)
        assert ours is None or ours[1] in longctx.commands, text
        found = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.split("#")[0]))
        assert found <= options_of(ours[1] if ours else ""), text
        make = re.match(r"make ([a-z-]+)", text)
        assert make is None or make[1] in targets, text


@by_page
def test_paths_and_names_exist(page: Path) -> None:
    text = page.read_text()
    top = "longctx_patch|cli|recipes|examples|benchmarks|tests|docs"
    for path in re.findall(rf"(?<![\w/.-])((?:{top})/[\w./-]*\w)", text):
        assert (ROOT / path).exists() or "NAME" in path, path
    for name in re.findall(r"\b(longctx_patch(?:\.\w+)+)", text):
        pkgutil.resolve_name(name)


@by_page
def test_python_compiles_and_its_imports_resolve(page: Path) -> None:
    for text in pages.blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_every_public_name_is_in_the_reference() -> None:
    made = (ROOT / "docs" / "reference" / "api.md").read_text().replace("\\_", "_")
    assert [name for name in longctx_patch.__all__ if f"## {name}\n" not in made] == []


def test_the_map_has_every_room_and_its_parts() -> None:
    paths = [MODULES[name] for name in IMPORTS]
    homes = {path if path.parent == PACKAGE else path.parent for path in paths}
    parts = {home.relative_to(ROOT).with_suffix("").as_posix() for home in homes}
    rooms = re.findall(r"^\| `([\w/]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(rooms) == sorted(part.removeprefix("longctx_patch/") for part in parts)


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/how-to/choose-degrees.md", ("auto", *PLANS)),
        ("docs/reference/kernels.md", available()),
        ("docs/explanation/memory.md", POLICIES),
    ],
)
def test_a_table_of_the_page_has_every_name(page: str, names: Iterable[str]) -> None:
    cells = re.findall(r"^\| (`.+?`) \|", (ROOT / page).read_text(), re.MULTILINE)
    assert set(names) <= set(re.findall(r"`(\w+)`", " ".join(cells)))


def messages() -> str:
    """Every string of the package, with an ellipsis for what is filled in."""
    found = []
    for path in (
        p for top in ("longctx_patch", "cli", "recipes") for p in (ROOT / top).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant):
                found.append(str(node.value))
    return "\n".join(found).replace("`", "")


def test_errors_that_are_explained_exist() -> None:
    text, known = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text(), messages()
    errors = re.findall(r"^\*\*`.+$", text, re.MULTILINE)
    parts = [part for error in errors for part in re.split(r"`|…|\*\*", error)]
    quoted = [part.strip() for part in parts if len(part.strip(" ,")) > 4 and " in a " not in part]
    assert len(quoted) > 20
    assert [part for part in quoted if part not in known and part not in dir(longctx_patch)] == []
