"""A run that is asked to end saves first, ends with a code of its own, and goes on exactly."""

import os
import select
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import yaml

from longctx_patch.checkpoints.series import checkpoints_of
from longctx_patch.checkpoints.signals import SAME_S, Agreement, StopSignals, stop_signals
from longctx_patch.cli import train
from longctx_patch.plugin.launch_yaml import accelerate_yaml
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.text_trainer import TextTrainer
from tests.harness import run_distributed
from tests.launching import start_forked, start_longctx
from tests.recipes.conftest import Start, numbers


def test_a_signal_leaves_a_note_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals() as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGUSR1)
        assert stop.asked == signal.SIGUSR1
        assert stop.agreed == 0  # until the ranks have compared
    assert signal.getsignal(signal.SIGUSR1) == before


def signal_thrice() -> None:
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        print("goes on", stop.asked, flush=True)
        time.sleep(SAME_S + 0.1)
        signal.raise_signal(signal.SIGTERM)
        print("never said", flush=True)


def test_a_second_signal_ends_the_process(tmp_path: Path) -> None:
    """At once, though the first one is not answered yet; but what comes with the first one is one
    with it, as that of a launcher whose whole group was signalled."""
    process = start_forked(signal_thrice, tmp_path / "said")
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    assert (tmp_path / "said").read_text() == "goes on 15\n"


def test_a_job_under_nohup_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that logs out would stop it. SIGUSR1 is answered also where it was ignored."""
    ignored = {signal.SIGHUP, signal.SIGUSR1}
    handlers = dict.fromkeys(ignored, signal.SIG_IGN)
    monkeypatch.setattr(signal, "getsignal", lambda n: handlers.get(n, signal.SIG_DFL))
    assert stop_signals() == [signal.SIGTERM, signal.SIGUSR1]
    handlers.clear()
    assert stop_signals() == [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


def agree_twice(rank: int) -> list[int]:
    with StopSignals() as stop:
        agreement, found = Agreement(stop), []
        for step in range(3):
            agreement.begin()
            if rank == 1 and step == 0:  # after the notes were taken
                signal.raise_signal(signal.SIGUSR1)
            agreement.end()
            found.append(stop.agreed)
    return found


def test_ranks_agree_at_the_end_of_the_same_step() -> None:
    usr1 = int(signal.SIGUSR1)
    assert run_distributed(agree_twice, 2) == [[0, usr1, usr1]] * 2


def test_a_run_saves_and_ends_after_the_step(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = partial(start, max_steps=4)
    whole = run(folder="whole")
    training_step = TextTrainer.training_step

    def signalled(trainer: TextTrainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step in (1, 3):  # the last time, the run ends anyway
            signal.raise_signal(signal.SIGTERM)
        return training_step(trainer, *args, **kwargs)

    monkeypatch.setattr(TextTrainer, "training_step", signalled)
    with pytest.raises(SystemExit) as ended:
        run(resume="auto")
    output = whole.with_name("out")
    assert ended.value.code == 128 + signal.SIGTERM
    assert [each.step for each in checkpoints_of(output).complete()] == [2]
    assert "stopped by SIGTERM after step 2" in capsys.readouterr().out
    assert not (output / "final").exists()
    run(resume="auto")
    assert numbers(output) == numbers(whole)
    assert [each.step for each in checkpoints_of(output).complete()] == [2, 4]
    weights = Path("final/adapter_model.safetensors")
    assert (output / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.fixture
def output(config_file: Path, text_file: Path, tmp_path: Path) -> Path:
    """That of a run folder for two processes on the CPU."""
    folder = tmp_path / "a run"
    folder.mkdir()
    settings = {"model": str(config_file), "text": str(text_file), "seq_len": 64, "ulysses": 2}
    settings |= {"output": str(folder / "training"), "max_steps": 2000, "scheduler": "constant"}
    (folder / "finetune.yaml").write_text(yaml.safe_dump(settings))
    (folder / "accelerate.yaml").write_text(
        accelerate_yaml(2, 2, fsdp=False, cpu=True, mixed_precision="no")
    )
    return folder / "training"


def wait_for_steps(output: Path, job: Any) -> None:
    limit = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or len(read_metrics(output)) < 3:
        assert time.monotonic() < limit
        assert job.is_alive()
        time.sleep(0.1)


def single_process(_: Any) -> None:
    """One that saves and ends when it is asked to, as Accelerate starts it."""
    saves = "trap 'exit 138' USR1; echo ready; sleep 60 & wait $!"
    subprocess.run(["bash", "-c", saves], check=True)


def launch_a_single_process() -> None:
    with mock.patch("accelerate.commands.launch.launch_command", single_process):
        train._launch(None, "finetune")


def test_longctx_train_hands_signals_on_to_a_single_process(tmp_path: Path) -> None:
    (said := tmp_path / "said").touch()
    job = start_forked(launch_a_single_process, said)
    try:
        while job.is_alive() and "ready" not in said.read_text():
            time.sleep(0.1)
        os.kill(job.pid, signal.SIGUSR1)
        job.join(50)
    finally:
        job.kill()
    assert job.exitcode == 138, said.read_text()


def test_longctx_train_hands_signals_on(output: Path, tmp_path: Path) -> None:
    """The launcher waits until the processes have saved, also one that was stopped, and ends with
    their code."""
    job = start_longctx(tmp_path / "said", "train", output.parent, "--resume", "auto")
    try:
        wait_for_steps(output, job)
        launcher = psutil.Process(job.pid)
        launcher.children()[1].suspend()
        launcher.send_signal(signal.SIGTERM)
        job.join(100)
    finally:
        job.kill()
    said = (tmp_path / "said").read_text()
    assert job.exitcode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    check_saved(output)
    assert said.count(f"stopped by SIGTERM after step {len(read_metrics(output))}") == 1


def check_saved(output: Path) -> None:
    (saved,) = checkpoints_of(output).complete()
    assert saved.step == len(read_metrics(output))
    assert not list(output.glob(".lock"))


def read_until(terminal: int, closing: threading.Event) -> None:
    """Read what is printed, as a terminal does, and close it when it is time."""
    while not closing.is_set():
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 2**16)
    os.close(terminal)


def test_a_closed_terminal_saves_the_run(output: Path) -> None:
    """The system sends SIGHUP to all processes, and the launcher hands it on as well. What they
    would print is an error by then."""
    ours, theirs = os.openpty()
    job = start_longctx(Path(os.ttyname(theirs)), "train", output.parent)
    closing = threading.Event()
    reader = threading.Thread(target=read_until, args=(ours, closing), daemon=True)
    reader.start()
    try:
        wait_for_steps(output, job)
        os.close(theirs)
        closing.set()
        reader.join()
        job.join(100)
        assert job.exitcode == 129
    finally:
        job.kill()
    check_saved(output)
