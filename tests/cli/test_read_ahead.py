"""`longctx train` asks for the weights while it imports, from a process that ends with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from longctx_patch.cli.read_ahead import ADVICE_BYTES, start_reading_ahead
from longctx_patch.cli.train import model_of

SIZES = {"a.safetensors": 3 * ADVICE_BYTES + 5, "b.safetensors": 7}
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the advice is Linux's")
SLEEPS = """
import os, sys, time
from longctx_patch.cli.read_ahead import start_reading_ahead
os.posix_fadvise = lambda *_: time.sleep(60)
start_reading_ahead(sys.argv[1])
print("started", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def advice(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which another process notes what it asks for."""
    notes = tmp_path_factory.mktemp("advice") / "notes"
    notes.touch()

    def note(number: int, start: int, length: int, kind: int) -> None:
        assert kind == os.POSIX_FADV_WILLNEED
        name = Path(os.readlink(f"/proc/self/fd/{number}")).name
        with notes.open("a") as file:
            file.write(f"{name} {start} {length}\n")

    monkeypatch.setattr(os, "posix_fadvise", note)
    return notes


def asked(notes: Path) -> dict[str, list[range]]:
    """The bytes that were asked for, by file."""
    found: dict[str, list[range]] = {}
    for line in notes.read_text().splitlines():
        name, start, length = line.split()
        found.setdefault(name, []).append(range(int(start), int(start) + int(length)))
    return found


@LINUX
def test_each_byte_is_asked_for_once_by_another_process(folder: Path, advice: Path) -> None:
    start_reading_ahead(str(folder))
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    found = asked(advice)
    assert found.keys() == SIZES.keys()
    for name, size in SIZES.items():
        assert [byte for each in found[name] for byte in each] == list(range(size))
        assert all(len(each) <= ADVICE_BYTES for each in found[name])


@LINUX
def test_no_more_than_memory_holds(
    folder: Path, advice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files beyond it would push out those read first."""
    free = SimpleNamespace(available=2 * SIZES["a.safetensors"])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    start_reading_ahead(str(folder))
    os.wait()
    assert asked(advice).keys() == {"a.safetensors"}


@LINUX
@pytest.mark.parametrize("model", ["", "config.json", "no-such/model", "not a name"])
def test_nothing_is_asked_for_without_files(
    model: str, folder: Path, advice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    start_reading_ahead(model)
    if model and not model.endswith(".json"):
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert asked(advice) == {}


def test_where_no_advice_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    monkeypatch.setattr(os, "fork", pytest.fail)
    start_reading_ahead(str(folder))


@LINUX
def test_it_ends_with_its_launcher(folder: Path) -> None:
    command = [sys.executable, "-c", SLEEPS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "started\n"
        (reader,) = psutil.Process(launcher.pid).children()
        launcher.send_signal(signal.SIGKILL)
    psutil.wait_procs([reader], timeout=10)
    assert not reader.is_running()


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ((), "of the file"),
        (("--max-steps", "3"), "of the file"),
        (("--max-steps", "3", "--model", "other"), "other"),
        (("--model=other",), "other"),
        (("--model",), ""),
    ],
)
def test_the_model_that_will_be_trained(settings: tuple[str, ...], model: str) -> None:
    assert model_of({"model": "of the file"}, settings) == model
