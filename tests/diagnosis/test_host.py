"""Memory, shared memory and open files, with numbers that are known."""

from math import inf
from pathlib import Path

from longctx_patch.diagnosis.host import (
    check_memory,
    check_open_files,
    check_shared,
    read_memory,
    read_open_files,
    read_shared,
)

GIB = 2**30


def test_memory_is_counted_for_each_process() -> None:
    assert check_memory(32 * GIB, 64 * GIB, 8).state == "ok"
    check = check_memory(31 * GIB, 64 * GIB, 8)
    assert check.state == "warning"
    assert check.found == "31.0 of 64.0 GiB free; 8 processes take about 32 GiB before the model"


def test_the_shared_memory_of_a_container() -> None:
    check = check_shared((64 * 2**20, 64 * 2**20))
    assert (check.state, "--ipc=host" in check.fix) == ("warning", True)
    assert check_shared((GIB, 2 * GIB)).state == "ok"
    assert check_shared(None).state == "skipped"
    assert read_shared(Path("/no/such/folder")) is None


def test_open_files() -> None:
    assert check_open_files(1024, 1024).state == "ok"
    assert check_open_files(inf, inf).state == "ok"
    assert check_open_files(256, inf).fix.endswith("ulimit -n 65536")
    assert check_open_files(256, 4096).fix.endswith("ulimit -n 4096")
    assert "limits.conf" in check_open_files(256, 512).fix


def test_what_is_read_here_is_possible() -> None:
    available, total = read_memory()
    assert 0 < available <= total
    soft, hard = read_open_files()
    assert 0 < soft <= hard
