"""Commands keep what Python compiles, where it would be compiled again in each process."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from longctx_patch.cli import main as module
from longctx_patch.cli.main import keep_bytecode


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to keep it in, where packages are not compiled and can't be."""
    package = SimpleNamespace(origin=str(tmp_path / "package" / "__init__.py"))
    monkeypatch.setattr(module, "find_spec", lambda name: package)
    monkeypatch.setattr(module, "_can_write", lambda path: False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")  # so that it is put back
    return tmp_path / "longctx_patch" / "bytecode"


@pytest.mark.parametrize("place", ["ours", "a user's own", "of others too", "python's"])
def test_it_is_kept_among_the_caches(
    place: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has said where, others may write there, or Python keeps it by itself."""
    if place == "a user's own":
        monkeypatch.setattr(sys, "pycache_prefix", "own")
    elif place == "of others too":
        kept.mkdir(parents=True)
        kept.chmod(0o777)
    elif place == "python's":
        monkeypatch.setattr(module, "_can_write", lambda path: True)
    before = sys.pycache_prefix
    keep_bytecode()
    if place != "ours":
        assert (sys.pycache_prefix, sys.dont_write_bytecode) == (before, True)
        return
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (str(kept), False)
    assert os.environ["PYTHONPYCACHEPREFIX"] == str(kept)
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert kept.stat().st_mode & 0o077 == 0
