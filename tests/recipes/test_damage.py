"""Damaged checkpoints of a real run: each is named with its file, and the one before is taken."""

import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from longctx_patch.checkpoints.manifest import MANIFEST, names_in, seal
from longctx_patch.checkpoints.series import Series, checkpoints_of, newest_good
from longctx_patch.rules.together import own_rank
from tests.harness import run_distributed
from tests.recipes.conftest import Start

RANDOM = random.Random(22)


def flip(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[RANDOM.randrange(len(content))] ^= 1 << RANDOM.randrange(8)
    return bytes(changed)


WAYS: list[Callable[[bytes], bytes]] = [
    lambda content: content + b"\n",
    lambda _: b"",
    # Zeros in place of the second half, as a disk that lost power leaves them.
    lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    *[lambda content: content[: RANDOM.randrange(len(content))], flip] * 6,
]


@pytest.fixture
def output(start: Start) -> Path:
    return start(max_steps=4, save_every=2, lora_dropout=0.1)


def damaged(output: Path) -> Iterator[tuple[Series, str]]:
    """The checkpoints with one file of the newest damaged, and that file's name."""
    series = checkpoints_of(output)
    newest, whole = series.path_of(4), output / "whole"
    shutil.copytree(newest, whole)
    for name, way in product([*names_in(whole), MANIFEST], [None, *WAYS]):
        for left in series.folder.glob("checkpoint-4*"):
            shutil.rmtree(left)
        shutil.copytree(whole, newest, copy_function=os.link)
        (newest / name).unlink()
        content = (whole / name).read_bytes()
        if way is None:  # it is gone
            yield series, name
        elif (spoilt := way(content)) != content:
            (newest / name).write_bytes(spoilt)
            yield series, name


def test_every_damage_of_every_file_is_named_and_the_one_before_is_taken(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpickled: list[str] = []
    monkeypatch.setattr(torch, "load", lambda *_, **__: unpickled.append("torch.load"))
    monkeypatch.setattr(pickle, "load", lambda *_, **__: unpickled.append("pickle.load"))
    trials = 0
    for series, name in damaged(output):
        said: list[str] = []
        with monkeypatch.context() as looked:
            looked.setattr(
                "longctx_patch.checkpoints.series.not_plain",
                lambda folder: [] if folder.name == "checkpoint-2" else [f"{folder} was unpickled"],
            )
            assert newest_good(series, said.append) == series.path_of(2)
        assert f"checkpoint-4: {name} " in said[0]
        assert said[1].startswith(f"going on from {series.path_of(2)}")
        assert [each.step for each in series.found()] == [2]
        trials += 1
    assert trials >= 200
    assert not unpickled


def of_two_ranks(rank: int, folder: str) -> list[str]:
    """Rank 1's file is damaged; both ranks say so."""
    series = checkpoints_of(folder)
    for step in (1, 2):
        path = series.path_of(step)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"random_{own_rank()}.safetensors").write_bytes(bytes([rank]) * 99)
        seal(path)
    if rank == 1:
        file = series.path_of(2) / "random_1.safetensors"
        file.write_bytes(flip(file.read_bytes()))
    torch.distributed.barrier()
    said: list[str] = []
    assert newest_good(series, said.append) == series.path_of(1)
    return said


def test_ranks_hash_their_own_files_and_agree(tmp_path: Path) -> None:
    said, same = run_distributed(of_two_ranks, 2, str(tmp_path))
    assert said == same
    assert "random_1.safetensors is damaged: it has another checksum" in said[0]
