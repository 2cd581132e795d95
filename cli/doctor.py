"""`longctx doctor`: whether this machine, or a launcher's world, can train, and what mends it."""

import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from longctx_patch.cli.doctor_report import AGAIN, ALL_NODES, Diagnosis, next_command, render

if TYPE_CHECKING:
    from longctx_patch.diagnosis.check import Check
    from longctx_patch.diagnosis.gpus import Gpus
    from longctx_patch.diagnosis.world import Place


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `longctx doctor`, as click reads them."""

    out: Path
    rendezvous: tuple[str, int] | None
    limit: float
    quick: bool


def _place(context: object, parameter: object, text: str | None) -> tuple[str, int] | None:
    from longctx_patch.diagnosis.network import USUAL_PORT, parse_place

    host = os.environ.get("MASTER_ADDR")
    if text is None and host:
        host = f"[{host}]" if ":" in host else host
        text = f"{host}:{os.environ.get('MASTER_PORT', USUAL_PORT)}"
    return None if text is None else parse_place(text)


@click.command("doctor", short_help="Check that this machine can train.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=".", help="Where runs will be [this folder]."
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    callback=_place,
    help="Where several nodes will meet [what MASTER_ADDR and MASTER_PORT say, if set].",
)
@click.option(
    "--limit", type=click.FloatRange(1), default=60.0, help="Seconds of the exchange [60]."
)
@click.option("--quick", is_flag=True, help="Without the exchange, and without timing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def doctor_command(as_json: bool, **options: Any) -> None:
    """Check that this machine can train, and print the command that mends what can't.

    Looks at Python and packages, torch's build and the driver, GPUs and their links, attention
    kernels, memory, disks, network and ports. Measures each GPU's matrix products and copies, and
    copies between GPUs: what is 10 % slower than its like, or than its kind is known to be, is a
    warning, 30 % a failure. Then processes, one for each GPU (two on the CPU
    with fewer than two GPUs), exchange what training exchanges; numbers are checked, and a hang
    ends at the limit. Under a launcher its own processes do this, on all nodes:
    `accelerate launch --config_file FILE -m longctx_patch.cli.main doctor`. Exit code 1 if
    something failed, 0 otherwise, also with warnings.
    """
    started, asked = time.perf_counter(), DoctorOptions(**options)
    broken = _without_torch()
    found, speaks = (broken, True) if broken else diagnose(asked)
    if speaks:
        seconds = time.perf_counter() - started
        click.echo(json.dumps(found.as_json()) if as_json else render(found, seconds))
    raise SystemExit(0 if found.ok else 1)


def _without_torch() -> Diagnosis | None:
    """What can be said where torch is missing or does not load; None where it does."""
    from longctx_patch.diagnosis.check import Check
    from longctx_patch.diagnosis.packages import check_packages, installed

    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # a library of CUDA that is missing is an OSError
        problem = Check("torch", "failed", f"import torch: {error}", "pip install torch")
        return _alone([check_packages(installed()), problem], AGAIN)
    return None


def diagnose(options: DoctorOptions) -> tuple[Diagnosis, bool]:
    """The checks of this machine or of the launcher's world, and whether this process reports."""
    from longctx_patch.diagnosis.exchange import check_exchange
    from longctx_patch.diagnosis.gpus import read_gpus
    from longctx_patch.diagnosis.speeds import known_link
    from longctx_patch.diagnosis.world import launched

    place = launched()
    if place is not None and not place.speaks_for_node:
        return _with_world(place, [], options, AGAIN)
    gpus = read_gpus()
    checks = _of_machine(options, gpus, place)
    following = next_command(gpus)
    known = known_link(gpus)
    if place is not None:
        return _with_world(place, checks, options, following, known)
    if not options.quick:
        checks.append(check_exchange(len(gpus.seen), options.limit, known=known))
    return _alone(checks, following), True


def _alone(checks: "list[Check]", following: str) -> Diagnosis:
    return Diagnosis([(platform.node(), each) for each in checks], following)


def _of_machine(options: DoctorOptions, gpus: "Gpus", place: "Place | None") -> "list[Check]":
    from longctx_patch.diagnosis import disk, host, packages, speeds
    from longctx_patch.diagnosis.bytecode import check_bytecode, compiled_each_time
    from longctx_patch.diagnosis.gpu_checks import check_gpus, check_links, check_torch
    from longctx_patch.diagnosis.kernels import check_fused_layers, check_kernels

    found = packages.installed()
    checks = [packages.check_packages(found)]
    if found is not None:
        checks = [packages.check_python(found), *checks, packages.check_extras(found)]
    checks.append(check_bytecode(compiled_each_time(), sys.pycache_prefix))
    checks += [check_torch(gpus), check_gpus(gpus), check_links(gpus)]
    if not options.quick:
        measured = speeds.measure_speeds(len(gpus.seen))
        checks.append(speeds.check_gpu_speed(gpus, measured))
        checks.append(speeds.check_link_speed(gpus, measured))
    # A launcher's other processes wait meanwhile, so kernels are not timed there.
    known = _kernels(timed=not options.quick and place is None)
    checks.append(check_kernels(known["auto"], known["kernels"]))
    checks.append(check_fused_layers(len(gpus.seen)))
    processes = place.local_ranks if place else max(len(gpus.seen), 1)
    checks.append(host.check_memory(*host.read_memory(), processes))
    checks.append(host.check_shared(host.read_shared()))
    checks.append(host.check_open_files(*host.read_open_files()))
    checks += [
        disk.check_disk(disk.look_at(purpose, path))
        for purpose, path in disk.folders(options.out).items()
    ]
    return [*checks, *_of_network(options, place)]


def _kernels(*, timed: bool) -> dict[str, Any]:
    """What `longctx kernels` knows; kernels are checked and timed if the GPU has room for it."""
    import torch

    from longctx_patch.cli import kernels

    try:
        return kernels.report(None if timed else False)
    except torch.OutOfMemoryError:
        return kernels.report(False)


def _of_network(options: DoctorOptions, place: "Place | None") -> "list[Check]":
    from longctx_patch.diagnosis import network

    here = network.read_network()
    if place is not None:
        several = place.local_ranks < place.num_ranks
        meeting = network.check_meeting(place.meeting[0], here)
    elif options.rendezvous is not None:
        several, meeting = True, network.check_rendezvous(*options.rendezvous, here)
    else:
        several, meeting = False, network.check_port()
    return [network.check_network(here, several_nodes=several), meeting]


def _with_world(
    place: "Place",
    checks: "list[Check]",
    options: DoctorOptions,
    following: str,
    known_link: float = nan,
) -> tuple[Diagnosis, bool]:
    """The exchange of all processes, with the checks of all nodes if that went well."""
    from longctx_patch.diagnosis.packages import installed
    from longctx_patch.diagnosis.world import check_world, member

    if options.quick:
        return _alone(checks, following), place.speaks_for_node
    known = installed()
    members, together = check_world(
        member(place, checks, known.of_numbers if known else {}), options.limit, known_link
    )
    theirs = [(each.place.host, check) for each in members for check in each.checks]
    met = len(members) == place.num_ranks
    found = Diagnosis([*theirs, *((ALL_NODES, each) for each in together)], following)
    if not met and not place.speaks_for_node:
        sys.stderr.write(f"rank {place.rank} on {place.host}: {together[-1].found}\n")
    return found, place.rank == 0 if met else place.speaks_for_node
