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

from longctx_patch.checkpoints.manifest import write_manifest
from longctx_patch.checkpoints.names import steps_of
from longctx_patch.recipes import finetune
from longctx_patch.recipes.launch import one_message
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.saving.disk import CantWriteError, SavingError, explained_disk
from tests.faults.plant import ALLOWED_BYTES, Fault
from tests.faults.trial import Job, make_folder, run_job

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
    series = steps_of(tmp_path)
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
    with pytest.raises(CantWriteError) as told, explained_disk(tmp_path, steps_of(tmp_path)):
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
    with pytest.raises(type(error)) as told, explained_disk(tmp_path, steps_of(tmp_path)):
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
    with pytest.raises(CantWriteError) as told, explained_disk(tmp_path, steps_of(tmp_path)):
        raise_of_rank(3, full)
    assert str(told.value).startswith(f"rank 3 could not write {file}: No space left on device.")
    with pytest.raises(SavingError) as other, explained_disk(tmp_path, steps_of(tmp_path)):
        raise_of_rank(2, PermissionError("not yours"))
    assert str(other.value).startswith("rank 2 failed in saving or reading ")
    assert str(other.value).endswith(": PermissionError: not yours")


def test_a_run_ends_with_one_message_and_goes_on(
    config_file: Path, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk of its second checkpoint is full: nothing is left of torch's writers' traces."""
    command = [f"--model={config_file}", f"--text={text_file}", "--seq-len=64", "--max-steps=4"]
    command += ["--full", "--save-every=2", "--scheduler=constant"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    finetune.main([*command, f"--output={whole}"])
    finetune.main([*command, "--max-steps=2", f"--output={out}"])
    capfd.readouterr()
    go_on = [*command, f"--output={out}", "--resume"]
    with full_disk(), pytest.raises(SystemExit) as ended, one_message("finetune"):
        finetune.main(go_on)
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert said.count("could not write") == 1
    assert "Traceback" not in said
    assert f"{out / 'checkpoints/step_000002'} is whole" in said
    finetune.main(go_on)
    losses = [[line["loss"] for line in read_metrics(folder)] for folder in (out, whole)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_of_a_job_one_rank_speaks(tmp_path: Path) -> None:
    """And `longctx train` ends with 1."""
    folder = make_folder(tmp_path / "run", Job("finetune", 2))
    ended = run_job(folder, ["--resume", "auto"], Fault("full disk", "save", 0), 100)
    assert ended.exit_code == 1
    assert ended.said.count("finetune: rank 0 could not write out/checkpoints/step_000004") == 1
    assert "out/checkpoints/step_000002 is whole" in ended.said
    assert "Traceback" not in ended.said
