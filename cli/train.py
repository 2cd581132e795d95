"""`longctx train`: start the recipe of a run folder on this machine.

It does what `accelerate launch` does with the folder's accelerate.yaml, but imports what the recipe
needs once, before the processes are forked. `accelerate launch` imports it in itself and again in
each process.
"""

import gc
import logging
import math
import multiprocessing
import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError
from tempfile import TemporaryDirectory
from typing import Any

import click
import yaml

from longctx_patch.cli.arguments import require_trl
from longctx_patch.recipes.run_record import (
    RECORD_FILE,
    SETTINGS_FILES,
    ended_record,
    settings_file_of,
)
from longctx_patch.recipes.yaml_file import read_yaml

LEFT_TO_TORCH = "SIGINT,SIGQUIT"
"""Signals that torch's launcher handles itself, as its option `signals_to_handle`."""
FLAGS = {"finetune": "--settings", "sft": "--config", "dpo": "--config"}
"""Each recipe's option for its settings file."""
SHARED_IMPORTS = (
    *("accelerate", "torch.distributed.run", "torch.distributed.fsdp"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    *("longctx_patch.hf.patching", "longctx_patch.plugin"),
)
"""What every recipe imports, without peft: that imports bitsandbytes, which sets up CUDA where it
is imported, and a forked process can't use what another one set up."""


class TrainCommand(click.Command):
    """Shows the flags of the recipe too, where `--help` stands beside a run folder."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        files = (settings_file_of(word) for word in args if not word.startswith("-"))
        ctx.obj = next((file for file in files if file is not None), None)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if ctx.obj is None:
            formatter.write("\n`longctx train RUN --help` lists RUN's settings as flags.\n")
        else:
            formatter.write(f"\n{recipe_flags(ctx.obj)}")


def recipe_flags(file: Path) -> str:
    """The help of the recipe's flags, with the values of its settings file in brackets."""
    from longctx_patch.recipes.settings_file import read_settings

    require_trl(file.stem)
    if file.stem == "finetune":
        settings = import_module("longctx_patch.recipes.settings")
        parser, kinds = settings.settings_parser(), settings.FIELD_TYPES
    else:
        config = import_module(f"longctx_patch.recipes.{file.stem}").METHOD.config
        settings = import_module("longctx_patch.recipes.trl_settings")
        parser, kinds = settings.settings_parser(config), settings.kinds_of(config)
    parser.set_defaults(**read_settings(file, kinds))
    return str(parser.format_help())


@click.command(
    "train",
    cls=TrainCommand,
    short_help="Train a run folder on this machine.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--num-processes",
    type=click.IntRange(1),
    help="In place of those of accelerate.yaml; a step keeps its number of rows.",
)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
def train_command(run: Path, num_processes: int | None, settings: tuple[str, ...]) -> None:
    """Train the run folder RUN of `longctx patch` with this machine's GPUs.

    SETTINGS go on to the recipe, for example `--max-steps 10` or `--resume`. The same as
    `accelerate launch` with the folder's accelerate.yaml, and sooner at its first step.
    """
    file = settings_file_of(run)
    launch_file = run / "accelerate.yaml"
    if file is None or not launch_file.is_file():
        raise ValueError(
            f"{run} is no run folder: it needs accelerate.yaml and {', '.join(SETTINGS_FILES[:-1])}"
            f" or {SETTINGS_FILES[-1]}. Make one with `longctx patch MODEL --out {run} ...`."
        )
    launch = read_yaml(launch_file)
    given = read_yaml(file)  # the processes read it too, after ten seconds of imports
    require_trl(file.stem)
    _check_output(run, given, settings)
    _check_one_machine(run, launch)
    if num_processes is not None:
        launch, forwards = on_processes(num_processes, launch, given, settings)
        settings = (*settings, *forwards)
    limit_threads(launch)
    recipe = file.stem
    forks = import_shared(recipe)
    _check_gpus(run, launch)
    start(launch, recipe, [FLAGS[recipe], str(file), *settings], forks=forks)


def setting_of(
    name: str, given: Mapping[str, Any], settings: Sequence[str], default: str = ""
) -> str:
    """The value of a setting: as on the command line, else as in the settings file."""
    words = [part for word in settings for part in word.split("=", 1)]
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        if flag in words:
            return next(iter(words[words.index(flag) + 1 :]), "")
    return str(given.get(name, default))


def on_processes(
    number: int, launch: Mapping[str, Any], given: Mapping[str, Any], settings: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """A launch file's content for this number of processes, and the flags that keep a step's rows.

    Raises ValueError for a number that the degrees or the rows of a step don't divide into.
    """
    from longctx_patch.plugin import accelerate_yaml

    names = ("ulysses", "ring", "gradient_accumulation_steps")
    had = [int(given.get(name, 1)) for name in names]
    ulysses, ring, forwards = (
        _whole(name, setting_of(name, given, settings, "1")) for name in names
    )
    degree = ulysses * ring
    if number % degree:
        shared = math.gcd(ulysses, number)
        raise ValueError(
            f"--num-processes {number} with ulysses {ulysses} x ring {ring}: {degree} processes "
            f"share a row, so their number is a multiple of {degree}. Give one, or add --ulysses "
            f"{shared} --ring {number // shared}."
        )
    batches, at_once = (
        launch.get("num_processes", 1) // (had[0] * had[1]) * had[2],
        number // degree,
    )
    added: list[str] = []
    if not any("accumulation" in word for word in settings) and at_once * forwards != batches:
        if batches % at_once:
            raise ValueError(
                f"--num-processes {number}: the batches of a step are {batches}, which {at_once} "
                f"groups of {degree} can't share evenly. Give a number of processes that can, "
                "or another step by --gradient-accumulation-steps N."
            )
        added = ["--gradient_accumulation_steps", str(batches // at_once)]
        click.echo(f"{' '.join(added)}: the batches of a step stay {batches}")
    fsdp, cpu = launch.get("distributed_type") == "FSDP", hides_gpus(launch)
    made = yaml.safe_load(accelerate_yaml(number, degree, fsdp=fsdp, cpu=cpu))
    replaced = {"distributed_type", "num_processes", "parallelism_config"}
    replaced |= {"use_cpu", "gpu_ids"} if cpu else set()
    kept = {name: value for name, value in launch.items() if name not in replaced}
    return kept | {name: made[name] for name in replaced & made.keys()}, added


def _whole(name: str, text: str) -> int:
    if not text.isdigit() or not int(text):
        raise ValueError(f"{name}={text!r}: give a whole number, 1 or more.")
    return int(text)


def hides_gpus(launch: Mapping[str, Any]) -> bool:
    """Says whether processes run on the CPU, as `longctx patch --cpu` writes it."""
    return bool(launch.get("use_cpu")) or str(launch.get("gpu_ids", "")).startswith("-1")


def _check_output(run: Path, given: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Refuse here, before imports, an output in which a run has begun and which none goes on in."""
    names = ("output", "output_dir")
    asked = [setting_of(name, {}, settings) for name in names]
    output = next(filter(None, [*asked, *map(given.get, names)]), None)
    resumes = any(word.startswith("--resume") for word in settings)
    resumes |= given.get("resume") not in (None, False, "no")
    if output is None or resumes or not (Path(output) / RECORD_FILE).is_file():
        return
    anew = f"`--output-dir {shlex.quote(str(run / 'again'))}` trains anew in another folder."
    if ended_record(Path(output)):
        raise ValueError(f"output {output!r} holds files of a run that has ended: {anew}")
    raise ValueError(
        f"output {output!r} holds files of a run that has not ended: `--resume auto` goes on with "
        f"it, {anew}"
    )


def _check_one_machine(run: Path, launch: dict[str, Any]) -> None:
    machines = launch.get("num_machines", 1)
    if machines > 1:
        slurm = shlex.join(["sbatch", "--nodes", str(machines), str(run / "slurm.sh"), str(run)])
        raise ValueError(
            f"{run} is for {machines} machines, and this starts the processes of one. Under Slurm: "
            f"`{slurm}`; otherwise `accelerate launch` on each, as {run / 'README.md'} says."
        )


def _check_gpus(run: Path, launch: Mapping[str, Any]) -> None:
    """Refuse here, once, what each of the processes would refuse."""
    import torch

    wanted, there = launch.get("num_processes", 1), torch.cuda.device_count()
    if hides_gpus(launch) or there >= wanted:
        return
    fewer = f" Or start {there} of them: --num-processes {there}." if there else ""
    raise ValueError(
        f"{run / 'accelerate.yaml'} is for {wanted} GPUs, and torch finds {there} here: `longctx "
        f"doctor` says what is missing.{fewer} To try it without GPUs, make a run folder by "
        "`longctx patch ... --cpu`."
    )


def limit_threads(launch: dict[str, Any]) -> None:
    """Set the threads of each process as `accelerate launch` does. They are read as torch is
    imported, so processes that are forked afterwards have what was set before."""
    processes = launch.get("num_processes", 1)
    if processes == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    from psutil import cpu_count

    cores = (cpu_count(logical=False) or 1) // processes if launch.get("use_cpu") else 1
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores))


def import_shared(recipe: str) -> bool:
    """Import what the recipe's processes share. Returns whether they can be forked from here."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking whether there are GPUs sets up none
    gc.disable()  # collections find nothing to free in imports, and take a sixth of their time
    for name in SHARED_IMPORTS:
        import_module(name)
    if find_spec("bitsandbytes") is None:
        import_module(f"longctx_patch.recipes.{recipe}")
    gc.freeze()  # nor in processes that share them, which would copy what collections touch
    gc.enable()
    import torch

    return not torch.cuda.is_initialized()


def start(launch: Mapping[str, Any], recipe: str, options: list[str], *, forks: bool) -> None:
    """Start the processes by Accelerate's launcher and torch's, and wait for them.

    Args:
        launch: what Accelerate's launch file holds.
    """
    with TemporaryDirectory(prefix="longctx_train_") as folder:
        (file := Path(folder) / "accelerate.yaml").write_text(yaml.safe_dump(dict(launch)))
        _start(file, recipe, options, forks=forks)


def _start(launch_file: Path, recipe: str, options: list[str], *, forks: bool) -> None:
    from accelerate.commands.launch import launch_command_parser

    script = str(files("longctx_patch.recipes") / "forked.py")
    given = ["--config_file", str(launch_file), "--main_process_port", "0"]
    arguments = launch_command_parser().parse_args(
        [*given, script, str(os.getpid()), recipe, *options]
    )
    from longctx_patch.cli.loopback import register_loopback

    arguments.rdzv_backend, arguments.rdzv_endpoint = register_loopback(), "127.0.0.1"
    arguments.run_path = True  # torch then runs the script in children of this process
    arguments.start_method = "fork" if forks else "spawn"
    arguments.signals_to_handle = LEFT_TO_TORCH
    # The processes say themselves why they end; torch would add the launcher's own traceback.
    for name in ("elastic", "elastic.agent.server.api", "elastic.multiprocessing.api"):
        logging.getLogger(f"torch.distributed.{name}").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    arguments.log_dir = str(launch_file.parent)
    _launch(arguments, recipe)


def _launch(arguments: Any, recipe: str) -> None:
    """Wait for what is launched. Raises SystemExit where it has not ended well."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from longctx_patch.checkpoints.signals import STOPPED
    from longctx_patch.recipes.launch import INTERRUPTED

    try:
        with handing_signals_on():
            launch_command(arguments)
    except ChildFailedError as error:
        codes = {each.exitcode for each in error.failures.values()}
        if codes <= STOPPED:  # a signal has stopped the run, which is saved
            raise SystemExit(max(codes)) from None
        click.echo(ending_of(error.failures), err=True, nl=False)
        raise SystemExit(1) from None
    except CalledProcessError as error:  # of a single process, which has said why
        raise SystemExit(error.returncode if error.returncode in STOPPED else 1) from None
    except (SignalException, KeyboardInterrupt) as stopped:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends what is left to be done
        number = getattr(stopped, "sigval", signal.SIGINT)
        if number == signal.SIGINT:
            click.echo(f"{recipe}: {INTERRUPTED}", err=True)
        raise SystemExit(128 + number) from None


@contextmanager
def handing_signals_on() -> Iterator[None]:
    """Within the context SIGTERM, SIGUSR1 and SIGHUP go on to the processes of the run, which save
    and end. torch's launcher would end itself, and kill them 30 seconds later: it does on a second
    SIGTERM."""
    import psutil
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from longctx_patch.checkpoints.signals import stop_signals

    seen: list[int] = []

    def hand_on(number: int, _: Any) -> None:
        seen.append(number)
        if seen.count(signal.SIGTERM) > 1:
            raise SignalException("a second SIGTERM", sigval=signal.SIGTERM)
        # Those that torch has started; a single process is one that Accelerate has.
        started = [each.pid for each in multiprocessing.active_children() if each.pid]
        for pid in started or [each.pid for each in psutil.Process().children()]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # one that was stopped would keep all from saving

    before = {number: signal.signal(number, hand_on) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ending_of(failures: Mapping[int, Any]) -> str:
    """Returns what is to be said of processes that ended a run, beyond what they said themselves.

    A process that lost another one fails too, and torch notices a signal late: so those that a
    signal ended come first, then the others in the order of their time.

    Args:
        failures: torch's `ProcessFailure` by rank. A refusal was printed by its process; the
            traceback of another exception is only in the file that it left.
    """
    signals = {rank: each for rank, each in failures.items() if each.exitcode < 0}
    traces = {rank: trace for rank, each in failures.items() if (trace := _trace(each))}
    lines = [
        f"rank {rank} was ended by {each.signal_name()}{_hint(each)}. "
        "A training goes on from its newest checkpoint by `--resume`."
        for rank, each in sorted(signals.items())
    ]
    if traces and not signals:
        first = min(traces, key=lambda rank: (failures[rank].timestamp, rank))
        lines.append(f"rank {first} failed:\n{traces.pop(first).rstrip()}")
    last_lines = {rank: trace.strip().splitlines()[-1] for rank, trace in sorted(traces.items())}
    lines += [f"rank {rank} failed too: {line}" for rank, line in last_lines.items()]
    return "".join(f"{line}\n" for line in lines)


def _hint(failure: Any) -> str:
    often = {
        "SIGKILL": " (often the system, when the host's memory is full)",
        "SIGBUS": " (a mapped file was cut or its disk is full, such as a table in the cache of "
        "`datasets` or a file of weights; the next start makes a damaged table anew)",
    }
    return often.get(failure.signal_name(), "")


def _trace(failure: Any) -> str | None:
    """The traceback of an exception; None for a refusal."""
    from longctx_patch.health.last_words import without_advice

    message = failure.error_file_data.get("message")
    trace = message["extraInfo"].get("py_callstack") if isinstance(message, dict) else None
    return None if trace is None else without_advice(trace)
