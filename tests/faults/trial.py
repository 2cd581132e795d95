"""A job of a recipe, started as `longctx train` starts it, with a fault planted in it or none."""

import gc
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

import longctx_patch.recipes.dpo  # launchers are forked with what is imported here
import longctx_patch.recipes.finetune
import longctx_patch.recipes.sft  # noqa: F401
from longctx_patch.cli.train import FLAGS, start
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.yaml_file import read_yaml
from tests.faults import plain_trainer
from tests.faults.plant import SAVE_EVERY, STEPS, STRUCK_FILE, Fault, plant
from tests.launching import start_forked
from tests.tiny_llama import TINY_LLAMA

NUMBERS = ("step", "loss", "grad_norm", "learning_rate")
Recipe = Literal["finetune", "sft", "dpo", "trainer"]
"""The last one is no recipe: a script of a user's, `plain_trainer.py`."""
TRAINERS: dict[str, Any] = {
    **{"output_dir": "out", "save_steps": SAVE_EVERY, "logging_steps": 1, "report_to": "none"},
    **{"use_cpu": True, "disable_tqdm": True},
}
OWN_SETTINGS: dict[Recipe, dict[str, Any]] = {
    "finetune": {"text": "text.txt", "output": "out", "save_every": SAVE_EVERY},
    "sft": {"data": ["rows.jsonl"], **TRAINERS},
    "dpo": {"data": ["pairs.jsonl"], **TRAINERS},
    "trainer": {},
}
"""Paths are taken from the run folder, in which jobs are started."""


@dataclass(frozen=True)
class Job:
    """A recipe over some processes of this machine."""

    recipe: Recipe
    num_ranks: int
    num_replicas: int = 1
    """Each of as many ranks."""

    @property
    def name(self) -> str:
        replicas = f" in {self.num_replicas} replicas" if self.num_replicas > 1 else ""
        return f"{self.recipe} on {self.num_ranks} ranks{replicas}"


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    exit_code: int | None
    """None: it had not ended in time, and was killed."""
    seconds_after: float | None
    """From the moment at which the fault struck; None: it did not."""
    said: str
    orphans: list[str]
    """Processes that outlived the launcher by more than two seconds, or the limit."""


def run_job(folder: Path, options: list[str], fault: Fault | None, limit_s: float) -> Ended:
    """Run the job of a run folder; `options` are the recipe's."""
    log, struck = folder / "said.txt", folder / STRUCK_FILE
    struck.unlink(missing_ok=True)
    launcher = start_job(folder, log, options, fault)
    launcher.join(limit_s)
    ended, exit_code = time.monotonic(), launcher.exitcode
    left = _outliving(launcher.pid, 2.0 if exit_code is not None else 0.0)
    names = [f"{process.pid}: {process.status()}" for process in left]
    for process in left:
        process.kill()
    launcher.join()
    said = log.read_text(errors="replace") if log.exists() else ""
    seconds = ended - float(struck.read_text()) if struck.exists() else None
    return Ended(exit_code, seconds, said, names)


def start_job(folder: Path, log: Path, options: list[str], fault: Fault | None) -> Any:
    """The process of a launcher that was started, which says everything into `log`."""
    log.unlink(missing_ok=True)
    return start_forked(_launch, log, folder, options, fault)


def _launch(folder: Path, options: list[str], fault: Fault | None) -> None:
    """In a forked process of its own session, by which its processes are found."""
    gc.freeze()  # as `longctx train` does: else each process copies what it looks at in its end
    os.chdir(folder)
    # Where the job's processes look for what they run.
    sys.modules["longctx_patch.recipes.trainer"] = plain_trainer
    flags = FLAGS | {"trainer": "--settings"}
    if fault is not None:
        plant(fault)
    (settings,) = (
        folder / f"{recipe}.yaml" for recipe in flags if (folder / f"{recipe}.yaml").exists()
    )
    given = [flags[settings.stem], str(settings), *options]
    start(read_yaml(folder / "accelerate.yaml"), settings.stem, given, forks=True)


def _outliving(session: int | None, patience_s: float) -> list[psutil.Process]:
    """Processes of the job that are there when patience is at its end."""
    deadline = time.monotonic() + patience_s
    while (found := of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def of_session(session: int | None) -> list[psutil.Process]:
    """The processes of a job that are there."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def make_folder(folder: Path, job: Job, **settings: Any) -> Path:
    """A run folder for a tiny model over ranks of this machine's CPU."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    _write_data(folder)
    ring = job.num_ranks // job.num_replicas
    replicas = {"parallelism_config_dp_replicate_size": job.num_replicas}
    launch = {
        **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU"},
        **{"use_cpu": False, "num_machines": 1, "machine_rank": 0, "num_processes": job.num_ranks},
        **{"mixed_precision": "no", "gpu_ids": ",".join(["-1"] * job.num_ranks)},
        "parallelism_config": {"parallelism_config_cp_size": ring}
        | (replicas if job.num_replicas > 1 else {}),
    }
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(launch))
    values = {
        **{"model": str(folder / "config.json"), "tokenizer": "bytes", "seq_len": 64},
        **{"full": True, "ring": ring, "max_steps": STEPS, "learning_rate": 0.01},
        **OWN_SETTINGS[job.recipe],
        **settings,
    }
    (folder / f"{job.recipe}.yaml").write_text(yaml.safe_dump(values))
    return folder


def _write_data(folder: Path) -> None:
    """For each of the recipes."""
    lines = [f"{number} times {number + 3} is {number * (number + 3)}.\n" for number in range(200)]
    (folder / "text.txt").write_text("".join(lines))
    rows = [{"input_ids": [*line.encode()]} for line in lines[:40]]
    pairs = [
        {"prompt": f"{number} times 3 is ", "chosen": f"{number * 3}.", "rejected": "many."}
        for number in range(40)
    ]
    tables: dict[str, list[Any]] = {"rows": rows, "pairs": pairs}
    for name, records in tables.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)


def outcome(folder: Path) -> tuple[list[tuple[float, ...]], str]:
    """The numbers of every step, and a digest of the final weights."""
    lines = read_metrics(folder / "out")
    numbers = [tuple(line[name] for name in NUMBERS) for line in lines]
    weights = (folder / "out/final/model.safetensors").read_bytes()
    return numbers, hashlib.sha256(weights).hexdigest()
