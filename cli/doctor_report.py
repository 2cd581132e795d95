"""What `longctx doctor` prints."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from longctx_patch.cli.text_table import aligned

if TYPE_CHECKING:
    from longctx_patch.diagnosis.check import Check
    from longctx_patch.diagnosis.gpus import Gpus

AGAIN = "longctx doctor"
ALL_NODES = "all"
"""The host of checks that all ranks do together."""


@dataclass(frozen=True)
class Diagnosis:
    """Checks by host, and what to run next."""

    checks: "Sequence[tuple[str, Check]]"
    """(host, check) in the order of the report."""
    next: str

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return list(dict.fromkeys(each.name for _, each in self.checks if each.state == "failed"))

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        checks = [{"host": host, **asdict(each)} for host, each in self.checks]
        return {"ok": self.ok, "checks": checks, "next": self.next}


def next_command(gpus: "Gpus") -> str:
    """What a user of this machine runs next."""
    from longctx_patch.predict.machines import machine_of

    if not gpus.seen:
        return "longctx patch MODEL --seq-len 2048 --gpus 2 --cpu --data texts/ --out run/"
    first = gpus.seen[0]
    near = machine_of(first.name, first.total_bytes)
    if near:
        return f"longctx plan MODEL --gpus {len(gpus.seen)}x{near.name.upper()} --max-seq-len"
    return f"longctx patch MODEL --seq-len 32768 --gpus {len(gpus.seen)} --data texts/ --out run/"


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
    if not found.ok:
        failed = ", ".join(found.failed)
        verdict = f"doctor: FAILED: {failed} ({seconds:.0f} s). Mend it, then run: {AGAIN}"
    else:
        noted = f", {warnings} warning(s)" if warnings else ""
        verdict = f"doctor: ok{noted} ({seconds:.0f} s). Next: {found.next}"
    return "\n".join([*lines, "", verdict])
