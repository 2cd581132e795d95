"""Packages that are compiled in each process, where Python keeps nothing and where `longctx` does.

A package named torch that does nothing stands in for the real one, in a process of its own.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from longctx_patch.diagnosis.bytecode import check_bytecode, kept_bytecode

ITS_VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
LOOK = """
from longctx_patch.diagnosis.bytecode import compiled_each_time
print(*(folder.name for folder in compiled_each_time()))
"""
START = """
import os, sys
from longctx_patch.cli.kept_bytecode import keep_bytecode
keep_bytecode()
import torch
print(sys.pycache_prefix, os.environ.get("PYTHONDONTWRITEBYTECODE"), torch.__cached__)
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a package that nobody has compiled."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package.parent


def outside() -> dict[str, str]:
    """The variables of this process, without those that say where Python keeps bytecode."""
    return {key: value for key, value in os.environ.items() if key not in ITS_VARIABLES}


def python(code: str, packages: Path, caches: Path, *options: str, **variables: str) -> str:
    environment = outside() | {"PYTHONPATH": str(packages), "XDG_CACHE_HOME": str(caches)}
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def compile_package(packages: Path) -> None:
    command = [sys.executable, "-m", "compileall", "-q", str(packages)]
    subprocess.run(command, env=outside(), check=True)


def test_what_python_keeps_itself_is_compiled_once(packages: Path, tmp_path: Path) -> None:
    assert "torch" not in python(LOOK, packages, tmp_path).split()
    assert python(START, packages, tmp_path).startswith("None None")
    assert not (tmp_path / "longctx_patch").exists()


def test_what_python_must_not_write_is_compiled_each_time(packages: Path, tmp_path: Path) -> None:
    assert "torch" in python(LOOK, packages, tmp_path, PYTHONDONTWRITEBYTECODE="1").split()
    assert "torch" in python(LOOK, packages, tmp_path, "-B").split()
    compile_package(packages)
    assert "torch" not in python(LOOK, packages, tmp_path, "-B").split()


def test_what_was_compiled_of_another_source_is_compiled_each_time(
    packages: Path, tmp_path: Path
) -> None:
    compile_package(packages)
    os.utime(packages / "torch" / "__init__.py", (time.time(), time.time() - 3600))
    assert "torch" in python(LOOK, packages, tmp_path, "-B").split()


def test_commands_keep_it_among_the_caches(packages: Path, tmp_path: Path) -> None:
    for _ in range(2):
        found = python(START, packages, tmp_path, PYTHONDONTWRITEBYTECODE="1").split()
        assert found[:2] == [str(tmp_path / "longctx_patch" / "bytecode"), "None"]
        assert Path(found[2]).is_relative_to(tmp_path / "longctx_patch" / "bytecode")
        assert Path(found[2]).is_file()
    assert not (packages / "torch" / "__pycache__").exists()
    assert (tmp_path / "longctx_patch" / "bytecode").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", ["a user's own", "no folder", "of others too"])
def test_commands_leave_what_they_cannot_change(place: str, packages: Path, tmp_path: Path) -> None:
    caches, variables = tmp_path, {"PYTHONDONTWRITEBYTECODE": "1"}
    if place == "no folder":
        caches = tmp_path / "file"
        caches.write_text("in the way")
    elif place == "of others too":
        kept = tmp_path / "longctx_patch" / "bytecode"
        kept.mkdir(parents=True)
        kept.chmod(0o777)
    else:
        variables["PYTHONPYCACHEPREFIX"] = str(tmp_path / "own")
    found = python(START, packages, caches, **variables).split()
    assert found[:2] == [variables.get("PYTHONPYCACHEPREFIX", "None"), "1"]


def folders(*names: str) -> Sequence[Path]:
    return [Path("/packages") / name for name in names]


def test_doctor_names_the_packages_and_the_command() -> None:
    assert check_bytecode([], None).state == "ok"
    assert check_bytecode(list(folders("torch")), "/own").state == "ok"
    check = check_bytecode(list(folders("torch", "sympy")), None)
    assert (check.state, check.fix) == ("warning", "python -m compileall -q -j 0 /packages")
    assert check.found == "each process that imports torch, sympy compiles them"
    check = check_bytecode(list(folders("torch")), str(kept_bytecode()))
    assert check.found.endswith(f"(not longctx's commands, which keep it in {kept_bytecode()})")
