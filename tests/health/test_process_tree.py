"""Which process is this one's launcher, also where it has gone before anybody looked."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from longctx_patch.health import process_tree


class Parent:
    """What psutil says of the process that started this one."""

    def __init__(self, words: str, name: str = "python", exe: str = "/usr/bin/python3.11") -> None:
        self._words, self._name, self._exe = words.split(), name, exe

    def cmdline(self) -> list[str]:
        return self._words

    def name(self) -> str:
        return self._name

    def exe(self) -> str:
        if not self._exe:
            raise psutil.AccessDenied
        return self._exe


def launcher(monkeypatch: pytest.MonkeyPatch, pid: int, parent: Parent, *, torchs: bool) -> Any:
    monkeypatch.setattr(os, "getppid", lambda: pid)
    monkeypatch.setattr(psutil, "Process", lambda _: parent)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchs:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    return process_tree.launcher()


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        ("/venv/bin/python /venv/bin/longctx train run", True),
        ("python -m longctx_patch.cli.main train run", True),
        ("python -u -X dev -m accelerate.commands.launch", True),
        ("/venv/bin/python3.11 /venv/bin/accelerate launch", True),
        ("accelerate-launch --config_file x", True),
        ("bash longctx_runs.sh", False),
        ("bash -c longctx train", False),
        ("python longctx_study.py", False),
        ("-bash", False),
    ],
)
def test_launchers_are_known_by_their_names(
    words: str, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell ends before what it has started: its scripts are none, whatever their names."""
    found = launcher(monkeypatch, 77, Parent(words), torchs=False)
    assert found == (77 if is_one else None)


@pytest.mark.parametrize(
    ("pid", "parent", "found"),
    [
        (77, Parent("pt_elastic", "pt_elastic"), 77),
        (1, Parent("python -m torch.distributed.run"), 1),  # of a container
        (1, Parent("sleep infinity", "sleep", "/usr/bin/sleep"), process_tree.GONE),
        (1, Parent("/sbin/init", "systemd", ""), process_tree.GONE),
        (912, Parent("systemd --user", "systemd", "/usr/lib/systemd"), process_tree.GONE),
    ],
)
def test_torchs_launcher_that_is_gone_is_not_mixed_up_with_who_adopts(
    pid: int, parent: Parent, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose launcher was killed during its imports saw another parent and kept to it."""
    assert launcher(monkeypatch, pid, parent, torchs=True) == found


ORPHAN = """
import os, sys, time
from pathlib import Path
from longctx_patch.health.process_tree import end_with
end_with(os.getppid() if sys.argv[1] == "parent" else 2**22 + 1, lambda words: print(words))
print("begins", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("parent", "code"), [("parent", 0), ("gone", 1)])
def test_a_process_ends_with_the_one_that_started_it(
    parent: str, code: int, tmp_path: Path
) -> None:
    """Also where that was gone before it could look."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    seconds = "5" if parent == "parent" else "120"
    done = subprocess.run(
        [sys.executable, str(script), parent, seconds],
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout.startswith(b"begins")
