"""`longctx train` has the weights read while it imports, by a process that ends with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from longctx_patch.cli.read_ahead import BLOCK_BYTES, start_reading_ahead
from longctx_patch.cli.train import setting_of

SIZES = {"a.safetensors": BLOCK_BYTES + 5, "b.safetensors": 7}
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that reads ahead")
SLEEPS = """
import os, sys, time
from longctx_patch.cli.read_ahead import start_reading_ahead
os.sendfile = lambda *_: time.sleep(60)
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
def notes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which another process notes what it reads."""
    found, send = tmp_path_factory.mktemp("notes") / "notes", os.sendfile
    found.touch()

    def note(place: int, number: int, start: int, length: int) -> int:
        assert os.readlink(f"/proc/self/fd/{place}") == os.devnull
        sent = send(place, number, start, length)
        name = Path(os.readlink(f"/proc/self/fd/{number}")).name
        with found.open("a") as file:
            file.write(f"{name} {start} {sent}\n")
        return sent

    monkeypatch.setattr(os, "sendfile", note)
    return found


def read(notes: Path) -> dict[str, list[range]]:
    """The bytes that were read, by file."""
    found: dict[str, list[range]] = {}
    for line in notes.read_text().splitlines():
        name, start, length = line.split()
        found.setdefault(name, []).append(range(int(start), int(start) + int(length)))
    return found


@LINUX
def test_each_byte_is_read_once_by_another_process(folder: Path, notes: Path) -> None:
    start_reading_ahead(str(folder))
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    found = read(notes)
    assert found.keys() == SIZES.keys()
    for name, size in SIZES.items():
        assert sum(map(len, found[name])) == size
        stops = [each.stop for each in found[name]]
        assert [each.start for each in found[name]] == [0, *stops[:-1]]


@LINUX
def test_no_more_than_memory_holds(
    folder: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files beyond it would push out those read first."""
    free = SimpleNamespace(available=2 * SIZES["a.safetensors"])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    start_reading_ahead(str(folder))
    os.wait()
    assert read(notes).keys() == {"a.safetensors"}


@LINUX
@pytest.mark.parametrize("model", ["", "config.json", "no-such/model", "not a name"])
def test_nothing_is_read_without_files(
    model: str, folder: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    start_reading_ahead(model)
    if model and not model.endswith(".json"):
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert read(notes) == {}


def test_other_systems_read_nothing_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
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
    assert setting_of("model", {"model": "of the file"}, settings) == model
