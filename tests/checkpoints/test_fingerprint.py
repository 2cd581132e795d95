"""A run goes on as one run, or says by name what it changes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from longctx_patch.checkpoints.fingerprint import (
    SAMPLE_BYTES,
    UNKNOWN_REVISION,
    problems,
    revision_of,
    sample_of,
    samples_of,
    tokenizer_digest,
)
from longctx_patch.recipes.models import byte_tokenizer

EXACT: dict[str, Any] = {"scheduler": "cosine", "lora_dropout": 0.1, "rows": "ab"}
RUN: dict[str, Any] = {
    "exact": EXACT,
    "config": {"num_hidden_layers": 2, "rms_norm_eps": 1e-6},
    "weights": {"model.safetensors": "8 bytes, sample aa"},
    "tokenizer": "cc",
    "versions": {"torch": "2.12.0"},
    "files": {"a.jsonl": "9 bytes, sample dd"},
    "world": {"processes": 2, "ulysses": 2},
}


def found(then: dict[str, Any], now: dict[str, Any], *allowed: str, **defaults: Any) -> str:
    said = problems(Path("out/checkpoint-2"), then, now, allowed=allowed, defaults=defaults)
    return "\n".join(said)


def test_each_difference_is_named_with_both_values_and_allowed_by_name() -> None:
    assert found(RUN, RUN) == ""
    for section, changed, name, words in (
        ("exact", {"lora_dropout": 0.2}, "lora_dropout", "lora_dropout is 0.2, the run has 0.1"),
        ("config", {"num_hidden_layers": 3}, "config.num_hidden_layers", "is 3, the run has 2"),
        ("config", {"rope_theta": 5}, "config.rope_theta", "is 5, the run has None"),
        ("weights", {"model.safetensors": "7"}, "weights", "is '7', the run has '8 bytes, sample"),
        ("versions", {"torch": "2.13.0"}, "versions.torch", "is '2.13.0', the run has '2.12.0'"),
    ):
        now = RUN | {section: RUN[section] | changed}
        said = found(RUN, now)
        assert words in said
        assert said.endswith(f"--allow-change {name}.")
        assert found(RUN, now, name) == ""
        assert found(RUN, now, "versions.peft" if section != "versions" else "config") != ""
    now = RUN | {"tokenizer": "ee"}
    assert "tokenizer is 'ee', the run has 'cc'" in found(RUN, now)
    assert found(RUN, now, "tokenizer") == ""


def test_other_files_are_named_where_rows_differ() -> None:
    now = RUN | {"files": {"a.jsonl": "8 bytes, sample ff"}}
    assert found(RUN, now) == ""  # the rows are the same
    now["exact"] = EXACT | {"rows": "cd"}
    assert "data a.jsonl: 8 bytes, sample ff, was 9 bytes, sample dd" in found(RUN, now)


def test_files_of_a_stream_are_what_it_is_known_by() -> None:
    """It has no digest of rows: other data was gone on with in silence."""
    stream = RUN | {"exact": {"scheduler": "cosine", "streaming": True}}
    for files, words in (
        (
            {"a.jsonl": "9 bytes, sample ff"},
            "files.a.jsonl is '9 bytes, sample ff', the run has '9",
        ),
        ({}, "files.a.jsonl is None, the run has"),
        (stream["files"] | {"b.jsonl": "1"}, "files.b.jsonl is '1', the run has None"),
    ):
        now = stream | {"files": files}
        said = found(stream, now)
        assert words in said
        assert said.endswith("--allow-change files.")
        assert found(stream, now, "files") == ""
        assert found(stream, now, "weights") != ""
    assert found(stream, stream) == ""
    # A revision that nobody knows is not said to be the same.
    for revision, same in (("revision ab", True), (UNKNOWN_REVISION, False)):
        run = stream | {"files": {"me/data": revision}}
        assert (found(run, run) == "") is same
        assert found(run, run, "files.me/data") == ""


def test_a_file_of_a_sampled_table_is_compared_with_that_of_its_name() -> None:
    """64 rows of a table over TRL are hashed. Files that were moved under other names are not
    compared, nor those of other rows, which are refused by themselves."""
    table = RUN | {"exact": EXACT | {"streaming": False}}
    now = table | {"files": {"a.jsonl": "9 bytes, sample ff"}}
    assert found(table, now).endswith("--allow-change files.")
    assert found(table, table | {"files": {"moved.jsonl": "9 bytes, sample ff"}}) == ""
    now["exact"] = EXACT | {"streaming": False, "rows": "cd"}
    assert found(table, now).endswith("--allow-change rows.")


def test_a_dataset_on_the_hub_is_known_by_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        def dataset_info(self, name: str, timeout: float) -> SimpleNamespace:
            if name == "me/gone":
                raise ConnectionError("no route to the hub")
            return SimpleNamespace(sha="ab12")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert revision_of("me/data") == "revision ab12"
    assert revision_of("me/gone") == UNKNOWN_REVISION


def test_samples_of_files_that_share_a_name_are_all_compared(tmp_path: Path) -> None:
    files = [tmp_path / name / "part.jsonl" for name in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(file.parent.name)
    (found,) = samples_of(files).values()
    assert found == f"{sample_of(files[0])} and {sample_of(files[1])}"


def test_names_that_nothing_has_are_refused() -> None:
    assert "Did you mean 'versions'?" in found(RUN, RUN, "version")


def test_another_version_may_know_more_of_a_config() -> None:
    newer = {"config": RUN["config"] | {"new_field": 1}, "versions": {"torch": "2.13.0"}}
    assert "new_field" in found(RUN, RUN | {"config": newer["config"]})
    assert found(RUN, RUN | newer, "versions") == ""


def test_a_run_of_an_older_version_goes_on_in_its_world() -> None:
    """With dropout the world must be the same, in the settings that both versions have."""
    then = RUN | {"world": {"processes": 2, "ulysses": 2, "ulysses_waves": 2}}
    assert found(then, RUN) == ""
    # If the older version had no such setting, it ran with the default.
    default = {"load_in_4bit": False}
    assert found(then, RUN | {"exact": EXACT | default}, **default) == ""
    now = RUN | {"exact": EXACT | {"load_in_4bit": True}}
    assert "load_in_4bit is True, the run has False" in found(then, now, **default)
    now = RUN | {"world": {"processes": 2, "ulysses": 1}}
    assert "the world was {'processes': 2, 'ulysses': 2} and is" in found(then, now)
    assert found(then, now, "world") == ""
    without = {"exact": EXACT | {"lora_dropout": 0.0}}
    assert found(then | without, now | without) == ""


def test_a_sample_tells_files_apart(tmp_path: Path) -> None:
    """Its header whole, and four places of what follows."""
    path = tmp_path / "model.safetensors"
    size = 8 * SAMPLE_BYTES
    seen = set()
    for dtype, first, last in (
        (torch.uint8, 0, 0),
        (torch.uint8, 1, 0),
        (torch.uint8, 0, 1),
        (torch.int8, 0, 0),
    ):
        content = torch.zeros(size, dtype=dtype)
        content[0], content[-1] = first, last
        save_file({"w": content}, path)
        seen.add(sample_of(path))
        assert sample_of(path) in seen  # it is the same each time
    save_file({"w": torch.zeros(size + 1, dtype=torch.uint8)}, path)
    assert len(seen | {sample_of(path)}) == 5
    (tmp_path / "empty.txt").write_text("")
    assert sample_of(tmp_path / "empty.txt").startswith("0 bytes")


def test_a_tokenizer_is_known_by_what_it_does() -> None:
    tokenizer = byte_tokenizer()
    digest = tokenizer_digest(tokenizer)
    assert tokenizer_digest(byte_tokenizer()) == digest
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_digest(tokenizer) != digest
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<eos>"
    assert tokenizer_digest(tokenizer) != digest
