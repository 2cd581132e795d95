"""What an installation contains: the moved folders under the package's name, and nothing else."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import longctx_patch
from longctx_patch.rules.versions import EXTRA, REQUIRED

ROOT = Path(__file__).parents[1]
COPIED = ("setup.py", "pyproject.toml", "LICENSE", "longctx_patch", "cli", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources, without network."""
    copy = tmp_path_factory.mktemp("sources")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "wheels"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", ".", *options],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (copy / "wheels").glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture
def wheel_names(wheel: zipfile.ZipFile) -> list[str]:
    return wheel.namelist()


@pytest.fixture
def required(wheel: zipfile.ZipFile) -> list[str]:
    """Not those of the installation, which may be older than the sources."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(name).decode().splitlines()
    return [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ")]


def test_the_wheel_has_one_package_with_every_module(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    version = f"longctx_patch-{longctx_patch.__version__}.dist-info"
    assert tops == {"longctx_patch", version}
    folders = {"longctx_patch": "longctx_patch", "cli": "longctx_patch/cli"}
    folders["recipes"] = "longctx_patch/recipes"
    wanted = {
        f"{name}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, name in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    recipes = ROOT / "recipes"
    launch_files = [*recipes.glob("accelerate/*.yaml"), *recipes.glob("slurm/*.sh")]
    wanted |= {f"longctx_patch/recipes/{path.relative_to(recipes)}" for path in launch_files}
    wanted |= {"longctx_patch/py.typed", f"{version}/METADATA"}
    assert wanted <= set(wheel_names), sorted(wanted - set(wheel_names))


def test_console_script() -> None:
    (script,) = (
        entry
        for entry in importlib.metadata.distribution("longctx-patch").entry_points
        if entry.group == "console_scripts"
    )
    assert (script.name, script.value) == ("longctx", "longctx_patch.cli.main:main")


def test_moved_folders_import_under_our_name_only(tmp_path: Path) -> None:
    """Outside the checkout `cli` and `recipes` are in the package, in editable installs too."""
    code = (
        "import importlib.util as u, longctx_patch.cli, longctx_patch.recipes; "
        "assert u.find_spec('cli') is None and u.find_spec('recipes') is None"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_bounds_of_what_is_required(required: list[str]) -> None:
    plain = {
        re.split(r"[<>=!]", line)[0]: line[len(re.split(r"[<>=!]", line)[0]) :]
        for line in required
        if "extra" not in line
    }
    asked_for = {"torch", "transformers", "accelerate", "datasets", "peft", "click"}
    # The six depend on these, but the package imports them too.
    imported = {"numpy", "packaging", "psutil", "PyYAML", "pyarrow", "tokenizers", "tqdm"}
    assert set(plain) == asked_for | imported
    for name, (oldest, newest) in REQUIRED.items():
        above = "1" if oldest.startswith("0.") else str(int(oldest[0]) + 1)
        if name == "transformers":  # its next minor version may change what a patch relies on
            major, minor = newest.split(".")
            above = f"{major}.{int(minor) + 1}"
        assert set(plain[name].split(",")) == {f">={oldest}", f"<{above}"}
    for name, (oldest, _) in EXTRA.items():
        assert f'{name}>={oldest}; extra == "{name}"' in required


def test_ci_runs_every_suite_and_the_oldest_transformers_that_setup_allows() -> None:
    (oldest,) = re.findall(r"transformers>=([\d.]+)", (ROOT / "setup.py").read_text())
    makefile, run = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    (tested,) = re.findall(r"^OLDEST := transformers==(\S+)$", makefile, re.M)
    assert tested == f"{oldest}.0"
    asked = {word for line in re.findall("^make ([^#\n]*)", run, re.M) for word in line.split()}
    assert {"style", "test-all", "test-oldest"} <= asked  # test-all has the tests of `make check`
    assert all((ROOT / path).exists() for path in re.findall(r"(?<= )tests/[\w./]+\b", makefile))
