"""Tiny configs, and the command line in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from longctx_patch.cli.main import main
from tests.tiny_llama import TINY_LLAMA

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs `longctx` with these words; an unexpected exception is raised, not swallowed."""

    def invoke(*words: object) -> Result:
        result = CliRunner().invoke(main, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes the tiny Llama's config.json, with changes."""

    def write(**changes: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        path = folder / "config.json"
        path.write_text(json.dumps({**TINY_LLAMA, **changes}))
        return path

    return write


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "some text.txt"  # it has a space, so commands must quote the path
    path.write_text("".join(f"{n} times {n + 3} is {n * (n + 3)}.\n" for n in range(400)))
    return path
