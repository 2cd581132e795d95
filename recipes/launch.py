"""Checks how the recipe was started, and ends it with one message where it refuses a run."""

import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import DistError

from longctx_patch.health.finite import BadStepError
from longctx_patch.health.last_words import say, words_of
from longctx_patch.health.replicas import ReplicasDivergedError
from longctx_patch.hf.sentinel import DriftError
from longctx_patch.recipes.memory_report import OutOfMemory
from longctx_patch.recipes.yaml_file import read_yaml

INTERRUPTED = (
    "interrupted by Ctrl-C. A training goes on from its newest checkpoint by `--resume`, if one "
    "was saved."
)
SECONDS_AFTER_RANK_0 = 15.0
"""How long other processes wait before they repeat a refusal. If rank 0 of their machine refused
too, the launcher ends them before, so the message appears once."""
SECONDS_AFTER_ANOTHER = 2.0
"""How long a process waits before it fails because it lost another one. A launcher ends a job with
the first process that has failed, and only that one's error is of use."""
WRONG_NUMBERS = BadStepError, DriftError, ReplicasDivergedError
"""What ends a run that would go on with numbers that are not right."""


def check_launcher(settings_file: Path | None, recipe: str = "finetune") -> None:
    """Refuse a run folder that was not started by the launcher that reads its accelerate.yaml.

    FSDP2 and mixed precision stand in that file only: under torchrun or srun, the run would
    silently train whole copies of the model in float32.
    """
    launch_file = settings_file and settings_file.parent / "accelerate.yaml"
    if not launch_file or not launch_file.is_file():
        return
    wanted = read_yaml(launch_file)
    lost = []
    if wanted.get("distributed_type") == "FSDP" and "ACCELERATE_USE_FSDP" not in os.environ:
        lost.append("distributed_type: FSDP")
    precision = wanted.get("mixed_precision", "no")
    if precision != "no" and "ACCELERATE_MIXED_PRECISION" not in os.environ:
        lost.append(f"mixed_precision: {precision}")
    if lost:
        command = shlex.join(["accelerate", "launch", "--config_file", str(launch_file)])
        raise ValueError(
            f"{launch_file} says {' and '.join(lost)}, which only `accelerate launch` reads: "
            "started by torchrun, srun or python, this run would train whole copies in float32. "
            f"Start it with `{command} -m longctx_patch.recipes.{recipe} ...` (under Slurm once on "
            "each machine, with --machine_rank and --main_process_ip)."
        )


@contextmanager
def one_message(program: str) -> Iterator[None]:
    """End the process with a refusal's message in place of a traceback; exit code 1.

    Ctrl-C reaches every process of a machine: the first says so, and all end with 130.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one needs no words of Python's
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say(f"{program}: {INTERRUPTED}")
        raise SystemExit(128 + signal.SIGINT) from None
    except (ValueError, OutOfMemory, *WRONG_NUMBERS) as error:
        _say(f"{program}: {error}")
        raise SystemExit(1) from None
    except OSError as error:
        if (words := words_of(error)) is None:
            raise
        _say(f"{program}: {words}")
        raise SystemExit(1) from None
    except RuntimeError as error:
        if _lost_another(error):
            time.sleep(SECONDS_AFTER_ANOTHER)
        raise


def _lost_another(error: RuntimeError) -> bool:
    """Says whether a message could not be exchanged."""
    return isinstance(error, DistError) or "gloo/transport" in str(error)


def _say(message: str) -> None:
    """Print a message that every process of a machine may have, and hand it to the launcher."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_AFTER_RANK_0)
    say(message)
