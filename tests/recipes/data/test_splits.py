"""Splits are named by sources, and what is evaluated is never what is trained."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from longctx_patch.recipes.data import addresses
from longctx_patch.recipes.data.addresses import Address, absolute, address_of
from longctx_patch.recipes.data.readers import records_of
from longctx_patch.recipes.data.records import BadRecord
from longctx_patch.recipes.data.sources import check_apart, check_evaluation, parts_of

COMMITS = ["a" * 40, "b" * 40]


def texts(source: Path | str) -> list[str]:
    return [r.fields["text"] for part in parts_of(str(source)) for r in records_of(part)]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """The same two splits as a saved dataset, and as folders of parquet and of JSON lines."""
    for names in (("train", "test"), ("train_sft", "test_sft")):
        splits = {name: Dataset.from_dict({"text": [name] * 2}) for name in names}
        DatasetDict(splits).save_to_disk(str(tmp_path / f"saved_{names[0]}"))
    for kind in ("parquet", "jsonl"):
        (tmp_path / kind).mkdir()
        for name in ("train", "test"):
            table = Dataset.from_dict({"text": [name] * 2})
            file = str(tmp_path / kind / f"{name}-00000-of-00001.{kind}")
            table.to_parquet(file) if kind == "parquet" else table.to_json(file)
    return tmp_path


@pytest.mark.parametrize("kind", ["saved_train", "parquet", "jsonl"])
def test_the_split_that_is_named_is_read(folders: Path, kind: str) -> None:
    assert texts(f"{folders}/{kind}:test") == ["test"] * 2
    assert texts(f"{folders}/{kind}/:train") == ["train"] * 2
    with pytest.raises(BadRecord, match=r"has the splits .*none named dev. Name .*:t"):
        parts_of(f"{folders}/{kind}:dev")


def test_splits_of_other_names(folders: Path) -> None:
    saved = folders / "saved_train_sft"
    assert texts(f"{saved}:test_sft") == ["test_sft"] * 2
    with pytest.raises(BadRecord, match=r"train_sft, test_sft, and none .* \S*sft:train_sft\."):
        parts_of(str(saved))
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(folders / "table"))
    assert texts(folders / "table") == ["a"]
    with pytest.raises(BadRecord, match=r"table is one table without splits. Leave out :test"):
        parts_of(f"{folders}/table:test")


def test_names_with_colons_that_are_there(tmp_path: Path) -> None:
    """A path that exists is never taken apart, nor is a glob that matches."""
    for name in ("a:test", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x:train.jsonl").write_text(json.dumps({"text": name}))
    (tmp_path / "a").mkdir()
    for source in ("a:test", "a:test/x:train.jsonl", "a:*/*:train.jsonl"):
        assert texts(tmp_path / source) == ["a:test"]
        assert absolute(str(tmp_path / source)) == str(tmp_path / source)
    with pytest.raises(ValueError, match=r"x:train.jsonl is a file, which has no splits"):
        parts_of(f"{tmp_path}/b/x:train.jsonl:test")


def test_addresses(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of("a/b") == Address("a/b", is_hub=True)
    assert address_of("a/b:x_y.z") == Address("a/b", "x_y.z", True)
    whole = Address("a/b", "test", True, "en-1 (new)", "refs/pr/1")
    assert address_of("a/b@refs/pr/1:en-1 (new)/test") == whole
    assert whole.named("dev") == "a/b@refs/pr/1:en-1 (new)/dev"
    for source in ("a/b.jsonl", "a/b:", "a/b:c/", "a/b/c:test", "a:test", "a/b:c/d/e"):
        assert not address_of(source).is_hub
    monkeypatch.chdir(folders.parent)
    assert absolute("a/b@v1:c/d") == "a/b@v1:c/d"
    assert absolute(f"{folders.name}/jsonl:test") == f"{folders}/jsonl:test"
    with pytest.raises(ValueError, match="is read as data"):
        check_apart(folders / "jsonl" / "run", [f"{folders}/jsonl:test"])


def test_what_is_trained_is_not_evaluated(folders: Path) -> None:
    saved, parquet, lines = (str(folders / name) for name in ("saved_train", "parquet", "jsonl"))
    for source in (saved, parquet):
        check_evaluation([source], [f"{source}:test"])
        with pytest.raises(ValueError, match=rf"{source}' has the splits train, test: .*:test"):
            check_evaluation([lines], [source])
        with pytest.raises(ValueError, match=rf"both read .*train.*split, such as {source}:test"):
            check_evaluation([lines, source], [f"{source}:train"])
    check_evaluation([f"{lines}:train"], [f"{lines}:test"])
    for data, evaluated in (
        ([lines], [lines]),
        ([lines], [f"{lines}:test"]),  # a folder of lines is read whole
        ([f"{parquet}/*.parquet"], [f"{parquet}:test"]),
        ([f"{lines}/train-*"], [f"{folders}/parquet/../jsonl/*.jsonl"]),
    ):
        with pytest.raises(ValueError, match=r"both read .*\. Give other files|both read .* Name"):
            check_evaluation(data, evaluated)


class Hub:
    """A dataset on the hub that has a new commit after each visit."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.visits, self.read = cache, 0, list[Any]()

    def card(self, name: str, file: str, *, repo_type: str, revision: str) -> str:
        assert (name, file, repo_type) == ("owner/name", "README.md", "dataset")
        commit = COMMITS[self.visits]
        self.visits += 1
        refs = self.cache / "datasets--owner--name" / "refs"
        refs.mkdir(parents=True, exist_ok=True)
        (refs / revision).write_text(commit)
        return str(self.cache / "snapshots" / commit / file)

    def gone(self, *_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    def load(self, *args: Any, **kwargs: Any) -> Any:
        self.read.append((args, kwargs))
        splits = {name: Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
        return DatasetDict(splits)


def test_a_dataset_on_the_hub_is_known_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows under the same name are another table; without a network it is the last one."""
    hub = Hub(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(addresses, "hf_hub_download", hub.card)
    monkeypatch.setattr(datasets, "load_dataset", hub.load)
    first, second = (parts_of("owner/name:main/test") for _ in COMMITS)
    assert [part.stamp for part in (*first, *second)] == [(commit,) for commit in COMMITS]
    monkeypatch.setattr(addresses, "hf_hub_download", hub.gone)
    assert parts_of("owner/name:main/test") == second
    assert parts_of(f"owner/name@{COMMITS[0]}:main/test") == first
    assert parts_of("owner/name@v1")[0].stamp == ("v1",)
    assert [r.fields["text"] for r in records_of(first[0])] == ["test"]
    options = {"revision": COMMITS[0], "streaming": True}
    assert hub.read == [(("owner/name", "main"), options)]
    assert texts("owner/name") == ["train"]
    with pytest.raises(ValueError, match=r"may have several splits: name .*owner/name:test"):
        check_evaluation(["owner/other"], ["owner/name"])
    with pytest.raises(ValueError, match=r"both read owner/name, split train"):
        check_evaluation(["owner/name"], ["owner/name:train"])
    check_evaluation(["owner/name"], ["owner/name:test"])
