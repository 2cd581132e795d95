"""A full disk is one message with the file, the space, what is whole and how to go on, not a page
of traces from each library and each rank."""

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from longctx_patch.checkpoints.disk import CantWriteError, SavingError, explained_disk
from longctx_patch.checkpoints.manifest import write_manifest
from longctx_patch.checkpoints.series import checkpoints_of
from tests.faults.plant import ALLOWED_BYTES

BIG = torch.zeros(10 * ALLOWED_BYTES)


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process can't become larger than a little."""
    signals = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ALLOWED_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signals)


def save_torch(path: Path) -> None:
    torch.save(BIG, path)


def save_torch_to_stream(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        torch.save(BIG, file)


def save_safetensors(path: Path) -> None:
    save_file({"big": BIG}, path)


def save_bytes(path: Path) -> None:
    path.write_bytes(bytes(4 * BIG.numel()))


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize("save", [save_torch, save_torch_to_stream, save_safetensors, save_bytes])
def test_every_library_s_error_is_one_message(
    save: object, with_checkpoint: bool, tmp_path: Path
) -> None:
    assert callable(save)
    series = checkpoints_of(tmp_path)
    if with_checkpoint:
        series.path_of(3).mkdir(parents=True)
        write_manifest(series.path_of(3), {})
    with (
        pytest.raises(CantWriteError) as told,
        full_disk(),
        explained_disk(tmp_path, series),
    ):
        save(tmp_path / "weights.bin")
    said = str(told.value)
    assert said.startswith(f"rank 0 could not write {tmp_path / 'weights.bin'}: ")
    assert f"On the disk of {tmp_path} " in said
    assert " GiB are free" in said
    whole = f"{series.path_of(3)} is whole" if with_checkpoint else "no checkpoint is whole yet"
    assert whole in said
    assert said.endswith("with --resume." if with_checkpoint else "with --resume auto.")


def test_a_disk_that_became_read_only_needs_no_room(tmp_path: Path) -> None:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "manifest.json"))
    with (
        pytest.raises(CantWriteError) as told,
        explained_disk(tmp_path, checkpoints_of(tmp_path)),
    ):
        raise error
    assert "manifest.json: Read-only file system" in str(told.value)
    assert str(told.value).endswith("Make it writable, and go on anew, with --resume auto.")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "No such file"),
        RuntimeError("shapes differ"),
        ValueError("a setting: [Errno 28] is in its text"),
        KeyError("x"),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    with (
        pytest.raises(type(error)) as told,
        explained_disk(tmp_path, checkpoints_of(tmp_path)),
    ):
        raise error
    assert told.value is error


def raise_of_rank(rank: int, error: BaseException) -> None:
    """As torch's checkpoints do on every rank, with all tracebacks in its text."""
    try:
        raise error
    except OSError as caught:
        raise CheckpointException("write", {rank: _wrap_exception(caught)}) from None


def test_of_torch_s_error_the_rank_that_failed_is_named(tmp_path: Path) -> None:
    """Not the one that says it, whose disk may have room."""
    file = tmp_path / "state"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    with (
        pytest.raises(CantWriteError) as told,
        explained_disk(tmp_path, checkpoints_of(tmp_path)),
    ):
        raise_of_rank(3, full)
    assert str(told.value).startswith(f"rank 3 could not write {file}: No space left on device.")
    with (
        pytest.raises(SavingError) as other,
        explained_disk(tmp_path, checkpoints_of(tmp_path)),
    ):
        raise_of_rank(2, PermissionError("not yours"))
    assert str(other.value).startswith("rank 2 failed in saving or reading ")
    assert str(other.value).endswith(": PermissionError: not yours")
