"""A tiny byte-level Llama's config and a text, written for each test."""

import json
from pathlib import Path

import pytest

from tests.tiny_llama import TINY_LLAMA


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of rows that this process makes are made for one test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The config.json of a model with an original length of 64 tokens."""
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


def write_documents(folder: Path, *lengths: int) -> Path:
    """A file of documents with these numbers of bytes; each repeats a letter of its own."""
    texts = (chr(97 + number) * length for number, length in enumerate(lengths))
    path = folder / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path
