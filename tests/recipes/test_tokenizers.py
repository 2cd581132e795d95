"""Tokenizers that can't be read, or have ids that the model has no embedding for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.families.load_config import load_model_config
from longctx_patch.recipes import models
from longctx_patch.recipes.settings import Settings
from tests.hf.tiny import tiny_config
from tests.recipes.conftest import settings_of


def given(folder: Path) -> Settings:
    return settings_of(tokenizer=str(folder))


BROKEN = {
    "tokenizer.json cut": ("tokenizer.json", lambda text: text[:-50]),
    "tokenizer.json empty": ("tokenizer.json", lambda _: ""),
    "tokenizer.json a list": ("tokenizer.json", lambda _: "[]"),
    "its config cut": ("tokenizer_config.json", lambda _: "{"),
    "its config a list": ("tokenizer_config.json", lambda _: "[]"),
    "eos a number": (
        "tokenizer_config.json",
        lambda text: json.dumps({**json.loads(text), "eos_token": 3}),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_named(name: str, tmp_path: Path) -> None:
    models.byte_tokenizer().save_pretrained(tmp_path)
    file: str
    change: Callable[[str], str]
    file, change = BROKEN[name]
    (tmp_path / file).write_text(change((tmp_path / file).read_text()))
    with pytest.raises(ValueError, match=f"no tokenizer found at '{tmp_path}' .*Give --tokenizer"):
        models.load_tokenizer(given(tmp_path))


def test_a_tokenizer_without_an_eos_token_is_refused(tmp_path: Path) -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'no eos token.*tokenizer_config.json \("eos_token"'):
        models.load_tokenizer(given(tmp_path))


def test_code_that_comes_with_a_tokenizer_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask whether to run it, and whoever answers yes runs it."""
    config = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(tiny_config("llama").to_json_string())
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(ValueError, match=r"needs Python code that .* not run here. Give --tokeni"):
        models.load_tokenizer(given(tmp_path))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    )
    with pytest.raises(ValueError, match=r"needs Python code that .* not run here: `longctx fam"):
        load_model_config(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_chat_template_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "other.jinja"
    settings = replace(given(tmp_path), tokenizer="bytes", chat_template=str(file))
    with pytest.raises(ValueError, match=f"chat_template: {file} can't be read .*Give a file"):
        models.load_tokenizer(settings)
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert models.load_tokenizer(settings).chat_template == file.read_text()
    file.write_text("{% for m in messages %}")
    with pytest.raises(ValueError, match=f"template in {file} is no Jinja, in line 1: .* Mend it"):
        models.load_tokenizer(settings)
    numbers = "{% for n in range(99999) %}"
    file.write_text(f"{numbers}{numbers}{numbers}{'{% endfor %}' * 3}")
    monkeypatch.setattr("longctx_patch.recipes.data.conversations.MOST_SECONDS", 0.1)
    with pytest.raises(ValueError, match=f"chat template in {file} has not come to an end in 0.1"):
        models.load_tokenizer(settings)
    file.write_text("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"template in {file} calls itself .* Mend its macros"):
        models.load_tokenizer(settings)


def test_ids_with_gaps_need_an_embedding_too(tmp_path: Path) -> None:
    """Their number says nothing of the largest."""
    models.byte_tokenizer().save_pretrained(tmp_path)
    content: dict[str, Any] = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["~"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = models.load_tokenizer(given(tmp_path))
    models.check_vocabulary(tokenizer, tiny_config("llama", vocab_size=301))
    with pytest.raises(ValueError, match="tokens, one with the id 300, the model vocab_size=300"):
        models.check_vocabulary(tokenizer, tiny_config("llama", vocab_size=300))
