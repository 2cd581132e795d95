"""A tiny byte-level Llama's config and a text, written for each test."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

from longctx_patch.recipes import finetune, models
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.settings import Settings
from tests.tiny_llama import TINY_LLAMA

Start = Callable[..., Path]
NUMBERS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "skipped")


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
def base(tmp_path: Path) -> Path:
    """Such a model with weights, whose tokens are bytes."""
    set_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY_LLAMA)).save_pretrained(tmp_path / "base")
    models.byte_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """5,000 bytes in which no two lines are alike."""
    path = tmp_path / "text.txt"
    lines = (f"{number} times {number + 3} is {number * (number + 3)}.\n" for number in range(999))
    path.write_text("".join(lines)[:5000])
    return path


@pytest.fixture
def start(config_file: Path, text_file: Path, tmp_path: Path) -> Start:
    """A function that runs the recipe with these flags and settings, and returns its output."""

    def started(*flags: str, folder: str = "out", **changes: Any) -> Path:
        places = {"model": config_file, "text": text_file, "output": tmp_path / folder}
        values = places | {"seq_len": 64, "max_steps": 5} | changes
        finetune.main([*flags_of(**values), *flags])
        return tmp_path / folder

    return started


def settings_of(model: Path | str = "m", **values: Any) -> Settings:
    """The recipe's settings, of which these are said."""
    usual: dict[str, Any] = {"model": str(model), "text": ["t"], "output": "out", "seq_len": 64}
    return Settings(**usual | values)


def loaded(settings: Settings, *, sharded: bool = False) -> Any:
    """The model on the CPU."""
    config, cpu = models.load_config(settings), torch.device("cpu")
    return models.load_model(settings, config, cpu, sharded=sharded, say=lambda _: None)


def flags_of(**values: Any) -> list[str]:
    """The flags of settings."""
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items())
    return [word for pair in pairs for word in pair]


def lines_to_load(final: Path) -> dict[str, Any]:
    """The names that the lines of code in a model's README.md leave behind."""
    code = "\n".join(re.findall("^    (.*)$", (final / "README.md").read_text(), re.MULTILINE))
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def numbers(output: Path) -> list[list[Any]]:
    """The numbers of each step, which must be bitwise equal in two equal runs."""
    return [[line.get(name) for name in NUMBERS] for line in read_metrics(output)]


def write_records(path: Path, records: Iterable[Any]) -> Path:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_documents(folder: Path, *lengths: int) -> Path:
    """A file of documents with these numbers of bytes; each repeats a letter of its own."""
    texts = (chr(97 + number) * length for number, length in enumerate(lengths))
    return write_records(folder / "documents.jsonl", ({"text": text} for text in texts))
