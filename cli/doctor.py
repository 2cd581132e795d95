"""`longctx doctor`: whether this machine, or a launcher's world, can train, and what mends it."""

import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from longctx_patch.cli.arguments import gone_option
from longctx_patch.cli.diagnosis import packages
from longctx_patch.cli.diagnosis.packages import Check
from longctx_patch.planner.machines import machine_of
from longctx_patch.rules.text_table import aligned

if TYPE_CHECKING:
    from longctx_patch.cli.diagnosis.gpus import Gpus
    from longctx_patch.cli.diagnosis.nodes import Place

AGAIN = "longctx doctor"
ALL_NODES = "all"
"""The host of checks that all ranks do together."""


@dataclass(frozen=True)
class Diagnosis:
    """Checks by host, and what to run next."""

    checks: Sequence[tuple[str, Check]]
    """(host, check) in the order of the report."""
    next: str

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return list(dict.fromkeys(each.name for _, each in self.checks if each.state == "failed"))

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        checks = [{"host": host, **asdict(each)} for host, each in self.checks]
        return {"ok": not self.failed, "checks": checks, "next": self.next}


@click.command("doctor", short_help="Check that this machine can train.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=".", help="Where runs will be [this folder]."
)
@gone_option("--rendezvous", "under the launcher of the run, doctor tries whether nodes meet")
@click.option(
    "--limit", type=click.FloatRange(1), default=60.0, help="Seconds of the exchange [60]."
)
@click.option("--quick", is_flag=True, help="Without the exchange, and without timing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def doctor_command(out: Path, limit: float, quick: bool, as_json: bool) -> None:
    """Check that this machine can train, and print the command that mends what can't.

    Looks at packages, torch's build and the driver, GPUs and their links, attention kernels and
    disks. Measures each GPU's matrix products and copies, and copies between GPUs: what is 10 %
    slower than its like, or than its kind is known to be, is a warning, 30 % a failure. Then
    processes, one for each GPU (two on the CPU with fewer than two GPUs), exchange what training
    exchanges; numbers are checked, and a hang ends at the limit. Under a launcher its own processes
    do this, on all nodes: `accelerate launch --config_file FILE -m longctx_patch.cli.main doctor`.
    Exit code 1 if something failed, 0 otherwise, also with warnings.
    """
    started = time.perf_counter()
    broken = _without_torch()
    found, speaks = (broken, True) if broken else diagnose(out, limit, quick=quick)
    if speaks:
        seconds = time.perf_counter() - started
        click.echo(json.dumps(found.as_json()) if as_json else render(found, seconds))
    raise SystemExit(1 if found.failed else 0)


def _without_torch() -> Diagnosis | None:
    """Returns what can be said where torch is missing or does not load; None where it does."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # a library of CUDA that is missing is an OSError
        problem = Check("torch", "failed", f"import torch: {error}", "pip install torch")
        return _alone([packages.check_packages(packages.installed()), problem], AGAIN)
    return None


def diagnose(out: Path, limit: float, *, quick: bool) -> tuple[Diagnosis, bool]:
    """The checks of this machine or of the launcher's world, and whether this process reports."""
    from longctx_patch.cli.diagnosis.exchange import check_exchange
    from longctx_patch.cli.diagnosis.gpus import read_gpus
    from longctx_patch.cli.diagnosis.nodes import launched

    place, checks, following = launched(), list[Check](), AGAIN
    if place is None or place.speaks_for_node:
        gpus = read_gpus()
        # A launcher's other processes wait meanwhile, so kernels are not timed there.
        checks = _of_machine(out, gpus, quick=quick, times_kernels=not quick and place is None)
        following = next_command(gpus, place)
    if place is not None:
        return _with_world(place, checks, limit, following, quick=quick)
    if not quick:
        checks.append(check_exchange(len(gpus.seen), limit))
    return _alone(checks, following), True


def _alone(checks: list[Check], following: str) -> Diagnosis:
    return Diagnosis([(platform.node(), each) for each in checks], following)


def _of_machine(out: Path, gpus: "Gpus", *, quick: bool, times_kernels: bool) -> list[Check]:
    from longctx_patch.cli.diagnosis import speeds, writable
    from longctx_patch.cli.diagnosis.gpus import check_gpus, check_links, check_torch

    checks = [packages.check_packages(packages.installed())]
    checks += [check_torch(gpus), check_gpus(gpus), check_links(gpus)]
    if not quick:
        measured = speeds.measure_speeds(len(gpus.seen))
        checks.append(speeds.check_gpu_speed(gpus, measured))
        checks.append(speeds.check_link_speed(gpus, measured))
    known = _kernels(timed=times_kernels)
    checks.append(packages.check_kernels(known["auto"], known["kernels"]))
    checks.append(packages.check_fused_layers(len(gpus.seen)))
    return [*checks, *map(writable.check_disk, writable.folders(out))]


def _kernels(*, timed: bool) -> dict[str, Any]:
    """Returns what `longctx kernels` knows; checks and times kernels if the GPU has room for it."""
    import torch

    from longctx_patch.cli import kernels

    try:
        return kernels.report(None if timed else False)
    except torch.OutOfMemoryError:
        return kernels.report(False)


def _with_world(
    place: "Place", checks: list[Check], limit: float, following: str, *, quick: bool
) -> tuple[Diagnosis, bool]:
    """The exchange of all processes, with the checks of all nodes if that went well."""
    from longctx_patch.cli.diagnosis.nodes import check_world, member

    if quick:
        return _alone(checks, following), place.speaks_for_node
    known = packages.installed()
    mine = member(place, checks, known.of_numbers if known else {})
    members, together = check_world(mine, limit)
    theirs = [(each.place.host, check) for each in members for check in each.checks]
    met = len(members) == place.num_ranks
    found = Diagnosis([*theirs, *((ALL_NODES, each) for each in together)], following)
    if not met and not place.speaks_for_node:
        sys.stderr.write(f"rank {place.rank} on {place.host}: {together[-1].found}\n")
    return found, place.rank == 0 if met else place.speaks_for_node


def next_command(gpus: "Gpus", place: "Place | None" = None) -> str:
    """Returns what a user of this machine, or of a launcher's machines, runs next."""
    number, nodes = len(gpus.seen), 1
    if place is not None:
        number, nodes = place.num_ranks, place.num_ranks // place.local_ranks
    near = machine_of(gpus.seen[0].name, gpus.seen[0].total_bytes) if gpus.seen else None
    if near:
        return f"longctx plan MODEL --gpus {number}x{near.name.upper()} --max-seq-len"
    several = f" --nodes {nodes}" * (nodes > 1)
    how = f"32768 --gpus {number}{several}" if gpus.seen else "2048 --gpus 2 --cpu"
    rope = "(a MODEL that reaches fewer tokens: add --rope yarn)"
    return f"longctx patch MODEL --seq-len {how} --data texts/ --out run/ {rope}"


def render(found: Diagnosis, seconds: float) -> str:
    """The table, what mends each problem, and the verdict with the next command."""
    hosts = {host for host, _ in found.checks} - {ALL_NODES}
    rows = [
        (each.name if len(hosts) < 2 else f"{each.name} ({host})", each)
        for host, each in found.checks
    ]
    table = [(name, each.state, each.found) for name, each in rows]
    lines = aligned([("CHECK", "STATE", "FOUND"), *table])
    to_mend = [f"  {name}: {each.fix}" for name, each in rows if each.fix]
    lines += ["", "To mend:", *to_mend] if to_mend else []
    warnings = sum(each.state == "warning" for _, each in found.checks)
    if found.failed:
        failed = ", ".join(found.failed)
        verdict = f"doctor: FAILED: {failed} ({seconds:.0f} s). Mend it, then run: {AGAIN}"
    else:
        noted = f", {warnings} warning(s)" if warnings else ""
        verdict = f"doctor: ok{noted} ({seconds:.0f} s). Next: {found.next}"
    return "\n".join([*lines, "", verdict])
