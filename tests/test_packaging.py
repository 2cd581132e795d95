"""What an installation contains: the moved folders under the package's name, and nothing else."""

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import longctx_patch
from longctx_patch.rules.versions import EXTRA, REQUIRED
from tests.built import COPIED, build_wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("built")))


@pytest.fixture
def wheel_names(wheel: zipfile.ZipFile) -> list[str]:
    return wheel.namelist()


@pytest.fixture
def required(wheel: zipfile.ZipFile) -> list[str]:
    """Not those of the installation, which may be older than the sources."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(name).decode().splitlines()
    return [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ")]


def test_what_the_metadata_says(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    said = wheel.read(name).decode()
    assert "\nRequires-Python: >=3.11\n" in said  # pip on 3.10 says so, and installs nothing
    assert "\nLicense-Expression: Apache-2.0\n" in said
    assert said.endswith((ROOT / "README.md").read_text("utf-8").strip() + "\n")


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


def test_the_image_installs_what_exists() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    assert copied == set(COPIED)
    sent = (ROOT / ".dockerignore").read_text().split()
    assert {name.removeprefix("!") for name in sent if name[0] == "!"} == copied
    (extras,) = re.findall(r'"\.\[(.+)\]"', "\n".join(lines))
    known = re.findall(r'^        "(\w+)": ', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(known)


def test_whoever_cites_or_reports_names_the_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == longctx_patch.__version__
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")]
    asked = [str(form["body"]) for form in forms if "body" in form]
    assert len(asked) == 2
    assert all("longctx doctor --json" in body for body in asked)
