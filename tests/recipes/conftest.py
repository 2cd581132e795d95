"""A tiny byte-level Llama and a text, made on the spot."""

import json
from pathlib import Path

import pytest

from tests.tiny_llama import TINY_LLAMA


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """config.json of a model that has seen 64 tokens."""
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY_LLAMA))
    return path


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """5,000 bytes in which no two lines are alike."""
    path = tmp_path / "text.txt"
    lines = (f"{number} times {number + 3} is {number * (number + 3)}.\n" for number in range(999))
    path.write_text("".join(lines)[:5000])
    return path
