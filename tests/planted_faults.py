"""Plant one fault in a room at a time; a test of that room has to notice it: `make planted-faults`.

A fault is put into the checkout itself, since processes that tests start import it from there, and
is taken out again whatever happens. Ends with 1 if a fault was not noticed.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """Wrong code in place of right code, and the tests that have to notice it."""

    file: str
    right: str
    wrong: str
    tests: str


FAULTS = (
    Fault(
        "longctx_patch/sequence/layout.py",
        "(cuts[rank], cuts[-1 - rank])",
        "(cuts[2 * rank], cuts[2 * rank + 1])",
        "tests/sequence",
    ),
    Fault(  # branches: a wrong shift, a sibling that is seen, a wrong parent
        "longctx_patch/sequence/masks.py",
        "begins[q] - begins[kv]",
        "edges[q] - edges[kv]",
        "tests/sequence/test_masks.py",
    ),
    Fault(
        "longctx_patch/sequence/masks.py",
        "for kv in documents.path(q)",
        "for kv in range(q + 1)",
        "tests/sequence/test_masks.py",
    ),
    Fault(
        "longctx_patch/sequence/documents.py",
        "found.insert(0, self.parents[found[0]])",
        "found.insert(0, found[0] - 1)",
        "tests/sequence/test_masks.py",
    ),
    Fault(  # a branch begins from zero, goes on from a sibling, or convolves a sibling's inputs
        "longctx_patch/plans/chain.py",
        "last.get(segment.document, last.get(parent))",
        "last.get(segment.document)",
        "tests/plans/test_chain.py",
    ),
    Fault(
        "longctx_patch/plans/chain.py",
        "last.get(segment.document, last.get(parent))",
        "number - 1 if parent >= 0 else last.get(segment.document)",
        "tests/plans/test_chain.py",
    ),
    Fault(
        "longctx_patch/plans/chain.py",
        "for other in self._before(number):",
        "for other in range(number)[::-1]:",
        "tests/plans/test_chain.py",
    ),
    Fault(
        "longctx_patch/plans/generators/table.py",
        '"zigzag_direct": PlanRecord(generate=direct_ring',
        '"zigzag_direct": PlanRecord(generate=ring',
        "tests/plans/generators",
    ),
    Fault(
        "longctx_patch/plans/verify/coverage.py",
        "if computed != wanted:",
        "if computed > wanted:",
        "tests/plans/verify",
    ),
    Fault(
        "longctx_patch/transport/meeting.py",
        "if any(row[0] != meeting for row in rows):",
        "if False:",
        "tests/transport",
    ),
    Fault(
        "longctx_patch/kernels/select/preference.py",
        "right.sort(key=lambda name: measured[name].total_s)",
        "right.sort()",
        "tests/kernels/select",
    ),
    Fault(
        "longctx_patch/memory/policies.py",
        "                keeps_attention=True,\n                action=",
        "                action=",
        "tests/memory/test_policies.py",
    ),
    Fault(
        "longctx_patch/loss/law.py",
        "return token_sum / count * self.num_averaged_ranks",
        "return token_sum / count",
        "tests/loss",
    ),
    Fault(
        "longctx_patch/planner/charges.py",
        "call = self.hardware.host_forward_s if forward else self.hardware.host_backward_s",
        "call = 0.0",
        "tests/planner/test_simulate.py",
    ),
    Fault(
        "longctx_patch/planner/degrees.py",
        "key=lambda key: (-tied[key].ulysses_degree, tied[key].sent_bytes, tied[key].buffer_bytes)",
        "key=lambda key: tied[key].ulysses_degree",
        "tests/planner/test_degrees.py",
    ),
    Fault(
        "longctx_patch/data/collator.py",
        "row.next_labels()",
        "row.labels",
        "tests/data",
    ),
    Fault(  # a token is shared by rows that go on otherwise
        "longctx_patch/data/prefixes.py",
        "if differ.any() else size) - 1)",
        "if differ.any() else size - 1))",
        "tests/data/test_prefixes.py",
    ),
    Fault(  # a label of one row leaks into another
        "longctx_patch/hf/row_outputs.py",
        "values.masked_fill(~shared.has_label.to(values.device), 0)",
        "values",
        "tests/hf/test_shared_rows.py",
    ),
    Fault(
        "longctx_patch/hf/call/fire_check.py",
        "problem = self._missing_layers()",
        "problem = None",
        "tests/hf/call",
    ),
    Fault(
        "longctx_patch/plugin/launch_yaml.py",
        '"fsdp_version": 2',
        '"fsdp_version": 1',
        "tests/plugin",
    ),
    Fault(
        "longctx_patch/health/finite.py",
        "optimizer.found_inf = pending.is_bad",
        "pass",
        "tests/health/test_finite.py",
    ),
    Fault(
        "longctx_patch/checkpoints/manifest.py",
        'return "" if found == record.sha256 else',
        'return "" if found else',
        "tests/recipes/test_damage.py",
    ),
)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Keep the fault in the checkout inside this context."""
    file = ROOT / fault.file
    right = file.read_text(encoding="utf-8")
    assert right.count(fault.right) >= 1, f"{fault.file} no longer has {fault.right!r}"
    file.write_text(right.replace(fault.right, fault.wrong, 1), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(right, encoding="utf-8")


def first_failure(tests: str) -> str | None:
    """The first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", tests]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else None


def main() -> int:
    missed = 0
    for fault in FAULTS:
        with planted(fault):
            failure = first_failure(fault.tests)
        missed += failure is None
        print(f"{fault.file}: {failure or f'NOT NOTICED by {fault.tests}'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
