"""`longctx train` starts what `accelerate launch` starts, from one process that has imported it."""

import dataclasses
import gc
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from longctx_patch.cli import train
from longctx_patch.cli.main import main as longctx
from longctx_patch.cli.train import ending_of, limit_threads, on_processes
from longctx_patch.plugin import accelerate_yaml
from longctx_patch.recipes.launch import INTERRUPTED
from longctx_patch.recipes.settings import Settings
from tests.cli.conftest import Run
from tests.launching import run_longctx, start_forked, start_longctx


def launch_slowly(folder: Path) -> None:
    """Start the run folder with a pause after each fork, and note when processes are forked and
    connect, and on which addresses the launcher's store listens."""
    os.chdir(folder)
    launcher, connect = os.getpid(), dist.init_process_group

    def note(kind: str) -> None:
        with Path("noted").open("a") as file:
            file.write(json.dumps([kind, time.monotonic()]) + "\n")

    def forked() -> None:
        if os.getpid() == launcher:
            note("forked")
            time.sleep(3)

    def listening(port: int) -> Iterator[str]:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for _, place, _, state, *_ in map(str.split, Path(table).read_text().splitlines()):
                if state == "0A" and place.endswith(f":{port:04X}"):
                    yield place[:-5]

    def noted(*given: Any, **more: Any) -> None:
        note("connects")
        note(" ".join(listening(int(os.environ["MASTER_PORT"]))))
        connect(*given, **more)

    os.register_at_fork(after_in_parent=forked)
    dist.init_process_group = noted
    longctx(["train", ".", "--max-steps", "1"])


@pytest.fixture
def folder(run: Run, config: Callable[..., Path], text_file: Path, tmp_path: Path) -> Path:
    """A run folder for two CPU processes."""
    made = tmp_path / "a run"
    options = ["--gpus", 2, "--cpu", "--seq-len", 64, "--data", text_file, "--out", made]
    result = run("patch", config(), *options)
    assert f"\n  longctx train {shlex.quote(str(made))}\n" in result.output
    return made


def test_a_file_that_is_no_yaml_is_refused_before_imports(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "import_shared", pytest.fail)
    file = folder / "finetune.yaml"
    file.write_text(file.read_text() + "seed: 1\nseed: 2\n")
    found = run("train", folder)
    assert found.exit_code == 1
    assert "finetune.yaml, line" in found.output
    assert "'seed' is given twice" in found.output


def test_an_output_with_a_run_is_refused_before_imports(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to type."""
    begins = OSError("imports")
    monkeypatch.setattr(train, "import_shared", mock.Mock(side_effect=begins))
    output = folder / "training"
    output.mkdir()
    (output / "settings.json").write_text("{}")
    again = f"`--output-dir '{folder}/again'` trains anew in another folder."
    found = run("train", folder)
    assert found.exit_code == 1
    assert f"a run that has not ended: `--resume auto` goes on with it, {again}" in found.output
    (output / "settings.json").write_text('{"ended": true}')
    (output / "final").mkdir()
    assert f"holds files of a run that has ended: {again}" in run("train", folder).output
    for words in (["--resume"], ["--resume", "auto"], [f"--output-dir={folder}/again"]):
        with pytest.raises(OSError, match="imports"):
            run("train", folder, *words)


def test_no_process_connects_while_others_are_still_to_be_forked(folder: Path) -> None:
    """It would connect to a store in the launcher, whose locks the next fork would take along."""
    launcher = start_forked(launch_slowly, folder / "said", folder)
    launcher.join(250)
    assert launcher.exitcode == 0, (folder / "said").read_text()
    noted = [json.loads(line) for line in (folder / "noted").read_text().splitlines()]
    forked, connected = ([t for kind, t in noted if kind == k] for k in ("forked", "connects"))
    assert len(forked) == len(connected) == 2
    assert min(connected) > max(forked)
    # Nor does that store listen on more than this machine's loopback.
    assert {kind for kind, _ in noted} == {"forked", "connects", "0100007F"}


def test_a_refusal_is_one_message(folder: Path) -> None:
    code, said = run_longctx(folder / "said", "train", folder, "--max-steps", 0)
    assert code == 1
    assert said.splitlines()[0] == "finetune: max_steps=0: it must be 1 or more."
    assert "Traceback" not in said


def failure(tmp_path: Path, rank: int, exitcode: int, message: Any = None) -> ProcessFailure:
    """A process that has left this message."""
    file = tmp_path / f"{rank}.json"
    if message:
        file.write_text(json.dumps({"message": message}))
    return ProcessFailure(local_rank=rank, pid=5, exitcode=exitcode, error_file=str(file))


def crash(at: int, last_line: str) -> dict[str, Any]:
    """What a process leaves that ended with an exception at a time."""
    trace = f"Traceback: x\n{last_line}\n"
    return {"message": "m", "extraInfo": {"timestamp": str(at), "py_callstack": trace}}


def test_of_other_ends_the_reason_is_shown(tmp_path: Path) -> None:
    """With the rank. What a process has printed itself is not repeated."""
    killed = failure(tmp_path, 1, -9)
    assert ending_of({1: killed}) == (
        "rank 1 was ended by SIGKILL (often the system, when the host's memory is full). "
        "A training goes on from its newest checkpoint by `--resume`.\n"
    )
    assert "a mapped file was cut" in ending_of({1: failure(tmp_path, 1, -7)})
    told = {"message": "finetune: no", "extraInfo": {"timestamp": "1"}}
    assert ending_of({0: failure(tmp_path, 0, 1, told)}) == ""
    advice = "  This is typically caused by a remote worker. GLHF! \U0001f3d6"
    lost = failure(tmp_path, 0, 1, crash(1, f"RuntimeError: Connection closed by peer{advice}"))
    assert ending_of({0: lost, 1: killed}).splitlines() == [
        ending_of({1: killed}).strip(),
        "rank 0 failed too: RuntimeError: Connection closed by peer",
    ]
    cause = failure(tmp_path, 2, 1, crash(0, "KeyError: 3"))
    assert ending_of({0: lost, 2: cause}).splitlines() == [
        *("rank 2 failed:", "Traceback: x", "KeyError: 3"),
        "rank 0 failed too: RuntimeError: Connection closed by peer",
    ]


@pytest.mark.parametrize("initialised", [False, True])
def test_processes_are_forked_unless_cuda_was_set_up(
    initialised: bool, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then they are started anew, since a forked one could not use CUDA."""
    started: list[Any] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: initialised)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", started.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run("train", folder).exit_code == 0
    (arguments,) = started
    assert arguments.start_method == ("spawn" if initialised else "fork")
    assert arguments.run_path
    assert gc.isenabled()
    wanted = [str(os.getpid()), "finetune", "--settings", str(folder / "finetune.yaml")]
    assert arguments.training_script_args == wanted


@pytest.mark.parametrize(
    "error",
    [SignalException("Process 7 got signal: 2", sigval=signal.SIGINT), KeyboardInterrupt()],
    ids=["of several processes", "of one process"],
)
def test_ctrl_c_is_one_line(
    error: BaseException, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked processes end without a word, and the launcher raises. A second one ends it at once:
    Python would print what it was just doing."""

    def interrupted(_: Any) -> None:
        raise error

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", interrupted)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        result = run("train", folder)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert result.output == f"finetune: {INTERRUPTED}\n"


def test_what_this_machine_can_not_start_is_refused(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(place: Path) -> str:
        result = run("train", place)
        assert result.exit_code == 1
        return result.output

    file = folder / "accelerate.yaml"
    launch = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(launch | {"num_machines": 2}))
    assert "is for 2 machines" in refused(folder)
    there = torch.cuda.device_count()
    gpus = {"num_processes": there + 1, "use_cpu": False, "gpu_ids": "all"}
    file.write_text(yaml.safe_dump(launch | gpus))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert f"torch finds {there} here" in refused(folder)
    (tmp_path / "empty").mkdir()
    said = refused(tmp_path / "empty")
    assert "is no run folder" in said
    assert "longctx patch MODEL --out" in said


def test_help_beside_a_run_folder_lists_the_flags_of_its_recipe(folder: Path, run: Run) -> None:
    assert "`longctx train RUN --help` lists" in run("train", "--help").output
    settings = yaml.safe_load((folder / "finetune.yaml").read_text())
    settings |= {"max_steps": 77, "full": True, "save_in_background": False}
    (folder / "finetune.yaml").write_text(yaml.safe_dump(settings))
    result = run("train", folder, "--max-steps", 3, "--help")
    assert result.exit_code == 0
    titles = [line for line in result.output.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == [
        *("Options:", "The model, and how it is loaded:"),
        *("How long rows are, and the context that RoPE is scaled for:",),
        *("The weights that are trained:", "What ends a run, or leaves out a step:"),
        *("What is evaluated during the training:",),
        *("The data and the output:", "How ranks share a row:", "The training itself:"),
    ]
    flat = " ".join(result.output.split())
    for line in ("say it [77]", "every weight [yes]", "for the copy [yes]", "<pad> 257 --"):
        assert line in flat
    listed = set(re.findall(r"^  --(?:no-)?([a-z-]\S+)", result.output, re.MULTILINE))
    names = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)}
    assert names <= listed


GIVEN = {"ulysses": 2, "ring": 1, "gradient_accumulation_steps": 3}
SIX = ["--gradient_accumulation_steps", "6"]


@pytest.mark.parametrize(
    ("number", "flags", "added", "cpu"),
    [
        (4, (), SIX, True),
        (8, (), [], False),
        (2, ("--ring=1", "--ulysses", "1"), SIX, False),
        (2, ("--gradient-accumulation-steps", "2"), [], True),
    ],
)
def test_on_another_number_of_processes_a_step_has_its_rows(
    number: int, flags: tuple[str, ...], added: list[str], cpu: bool
) -> None:
    launch = yaml.safe_load(accelerate_yaml(8, 2, fsdp=not cpu, cpu=cpu)) | {"debug": True}
    found, more = on_processes(number, launch, GIVEN, flags)
    assert more == added
    degree = 1 if "1" in flags else 2
    made = yaml.safe_load(accelerate_yaml(number, degree, fsdp=not cpu, cpu=cpu))
    assert found == made | {"debug": True}


@pytest.mark.parametrize(
    ("number", "flags", "message"),
    [
        (3, (), r"their number is a multiple of 2\. Give one, or add --ulysses 1 --ring 3"),
        (10, (), "the batches of a step are 12, which 5 groups of 2 can't share evenly"),
        (4, ("--ring", "x"), "ring='x': give a whole number"),
    ],
)
def test_a_number_of_processes_that_does_not_divide_is_refused(
    number: int, flags: tuple[str, ...], message: str
) -> None:
    launch = yaml.safe_load(accelerate_yaml(8, 2, fsdp=True))
    with pytest.raises(ValueError, match=message):
        on_processes(number, launch, GIVEN, flags)


@pytest.mark.parametrize(
    ("launch", "given", "threads"),
    [
        ({"num_processes": 2}, None, "1"),
        ({"num_processes": 2, "use_cpu": True}, None, "4"),
        ({"num_processes": 16, "use_cpu": True}, None, "1"),
        ({"num_processes": 2}, "3", "3"),
        ({"num_processes": 1}, None, None),
    ],
)
def test_threads_are_those_of_accelerate_launch(
    launch: dict[str, Any], given: str | None, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of 8 cores, unless the user has said how many."""
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")  # so that it is given back
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads(launch)
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.timeout(180)  # waits for what may never come
def test_an_orphan_of_a_launcher_that_was_killed_ends(
    run: Run, config: Any, text_file: Path, tmp_path: Path
) -> None:
    """One whose launcher was killed while it was importing trained for ever."""
    folder = tmp_path / "run"
    options = ["--gpus", 1, "--cpu", "--seq-len", 64, "--data", text_file]
    assert run("patch", config(), *options, "--out", folder).exit_code == 0
    log = tmp_path / "said.txt"
    launcher = start_longctx(log, "train", folder, "--max-steps", "1000000")
    started: list[psutil.Process] = []
    try:
        while not started:
            assert launcher.is_alive()
            started = psutil.Process(launcher.pid).children()
            time.sleep(0.05)
        launcher.kill()
        _, left = psutil.wait_procs(started, timeout=60)
        assert not left
        assert "launcher is gone" in log.read_text()
    finally:
        launcher.kill()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
