"""A folder with data of each kind for recipes over TRL, and `longctx patch` upon it."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from longctx_patch.cli.main import main as longctx
from tests.recipes.conftest import write_records
from tests.recipes.data.test_reading import words
from tests.tiny_llama import TINY_LLAMA
from tests.trl.cases import rows


def invoke(job: Path, *options: str) -> Result:
    """`longctx patch` for two CPU processes."""
    words = ["patch", str(job / "tiny" / "config.json"), "--rope", "linear"]
    words += [] if "--stages" in options else ["--seq-len", "96"]
    words += ["--gpus", "2", "--cpu", "--out", str(job / "run")]
    return CliRunner().invoke(longctx, [*words, *options])


def patch(job: Path, *options: str) -> str:
    """What `longctx patch` says when it writes a run folder."""
    found = invoke(job, *options)
    assert found.exit_code == 0, found.output
    return found.output


def save_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Save a tokenizer of words, and the config of a tiny model for it, which is returned."""
    tokenizer = words()
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = TINY_LLAMA | ends | {"vocab_size": len(tokenizer)} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return config


def make_job(tmp_path: Path) -> Path:
    """A folder with a model's config and tokenizer, and data of each kind."""
    save_config(tmp_path / "tiny")
    for name, kind, number, seed in (
        ("chats", "chat", 12, 1),
        ("held_out", "chat", 3, 2),
        ("pairs", "pairs", 8, 3),
        ("texts", "text", 8, 4),
    ):
        write_records(tmp_path / f"{name}.jsonl", rows(kind, number, seed))
    return tmp_path
