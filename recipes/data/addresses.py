"""Reads what a source of data names: a file, folder, glob or dataset on the hub, and its split.

A split follows a colon, `folder:test`. A dataset on the hub may have a revision and a config too,
`owner/name@revision:config/split`, as they stand in the hub's own addresses. A path that is there
as it is written is that path, whatever colons it has.
"""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.file_download import repo_folder_name

from longctx_patch.recipes.data.records import BadRecord

TRAIN = "train"
_SPLIT = r"(?P<split>\w+(\.\w+)*)"
_HUB = re.compile(
    rf"(?P<path>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:((?P<config>[^:/@]+)/)?{_SPLIT})?"
)
_LOCAL = re.compile(rf"(?P<path>.+):{_SPLIT}", re.DOTALL)
_FILE = re.compile(
    r".*\.(jsonl|ndjson|jsonlines|json|csv|tsv|parquet|arrow|txt|md|gz|zst|zip)", re.IGNORECASE
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Address(NamedTuple):
    """A source, taken apart."""

    path: str
    """A path on this machine, or the name of a dataset on the hub."""
    split: str = ""
    is_hub: bool = False
    config: str = ""
    revision: str = ""

    def named(self, split: str) -> str:
        """The source that names this split of it."""
        revision = f"@{self.revision}" if self.revision else ""
        config = f"{self.config}/" if self.config else ""
        return f"{self.path}{revision}:{config}{split}"


def address_of(source: str) -> Address:
    """Raises ValueError for the split of a file, which has none."""
    path = Path(source).expanduser()
    if path.exists() or glob.glob(str(path), recursive=True):
        return Address(source)
    if found := _LOCAL.fullmatch(source):
        beside = Path(found["path"]).expanduser()
        if beside.is_dir():
            return Address(found["path"], found["split"])
        if beside.exists():
            raise ValueError(
                f"{source!r}: {found['path']} is a file, which has no splits. Give the file, or "
                "the folder that it lies in."
            )
    found = _HUB.fullmatch(source)
    if not found or _FILE.fullmatch(found["path"]):
        return Address(source)
    split, config, revision = (found[name] or "" for name in ("split", "config", "revision"))
    return Address(found["path"], split, True, config, revision)


def absolute(source: str) -> str:
    """A path without regard to the current directory; the name of a dataset stays as it is."""
    address = address_of(source)
    if address.is_hub:
        return source
    path = os.path.realpath(Path(address.path).expanduser())  # of a link to itself too
    return f"{path}:{address.split}" if address.split else path


def chosen_split(splits: Sequence[str], asked: str, path: str) -> str:
    """The split that was asked for, else the one to train on. Raises BadRecord without it."""
    wanted = asked or TRAIN
    if wanted not in splits:
        raise BadRecord(
            f"{path} has the splits {', '.join(map(str, splits))}, and none named {wanted}. Name "
            f"the one that is meant, such as {Address(path).named(splits[0])}."
        )
    return wanted


def commit_of(address: Address) -> str:
    """The commit of a dataset on the hub, by which other rows under its name are noticed; without a
    network the one that this machine has, and the revision's name where it has none."""
    revision = address.revision or constants.DEFAULT_REVISION
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        card = hf_hub_download(address.path, "README.md", repo_type="dataset", revision=revision)
        return Path(card).parent.name
    except OSError:  # no such file there, or no network: the commit was kept all the same
        folder = repo_folder_name(repo_id=address.path, repo_type="dataset")
        kept = Path(constants.HF_HUB_CACHE, folder, "refs", revision)
        return kept.read_text().strip() if kept.is_file() else address.revision
