"""Proof that a patched model computes what one process would, on CPU without weights or network."""

from longctx_patch.transport.processes import ProcessesFailedError, run_processes
from longctx_patch.verification.cases import Report, all_configs
from longctx_patch.verification.proof import verify
from longctx_patch.verification.virtual_ranks import VirtualParity, verify_on_virtual_ranks

__all__ = [
    "ProcessesFailedError",
    "Report",
    "VirtualParity",
    "all_configs",
    "run_processes",
    "verify",
    "verify_on_virtual_ranks",
]
