"""A file that keeps what was measured on this machine, so that it is measured once."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from longctx_patch.kernels.base import KernelRequest, dtype_name
from longctx_patch.kernels.select.probe import Measured
from longctx_patch.rules.user_cache import user_cache

_METHOD = "probe 2"  # raise the number when measurements of older versions no longer hold


def default_path() -> Path:
    """The file among a user's caches."""
    return user_cache() / "kernels.json"


def machine_label(package_versions: Mapping[str, str | None]) -> str:
    """Everything that may change how fast a kernel is, or whether it is right. Needs a GPU."""
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: None)  # no public name
    packages = [f"{name} {version}" for name, version in package_versions.items() if version]
    return "; ".join(
        [
            _METHOD,
            torch.cuda.get_device_name(),
            f"driver {driver()}",
            f"torch {torch.__version__}",
            f"CUDA {torch.version.cuda}",
            f"cuDNN {torch.backends.cudnn.version()}",
            *packages,
        ]
    )


@dataclass(frozen=True)
class ProbeCache:
    """One JSON file: machine -> request -> kernel -> what it did.

    A file that can't be read or understood counts as empty; if it can't be written, nothing is kept
    on disk.
    """

    path: Path
    machine: str

    def read(self, request: KernelRequest) -> dict[str, Measured]:
        try:
            rows = self._content()[self.machine][_label(request)]
            return {name: _measured(row) for name, row in rows.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            return {}

    def write(self, request: KernelRequest, measured: Mapping[str, Measured]) -> None:
        """Add to the file, which is replaced atomically: others never read half of it."""
        rows = {
            name: {"seconds": {c: list(s) for c, s in one.seconds.items()}, "problem": one.problem}
            for name, one in measured.items()
        }
        with suppress(OSError):
            content = self._content()
            machine = content.get(self.machine)
            content[self.machine] = {
                **(machine if isinstance(machine, dict) else {}),
                _label(request): rows,
            }
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(content, file, indent=1)
            os.replace(file.name, self.path)

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def _label(request: KernelRequest) -> str:
    kind = "pieces" if request.pieces else "causal"
    capped = ", softcap" if request.softcap else ""
    ordered = ", deterministic" if request.deterministic else ""
    return (
        f"{dtype_name(request.dtype)}, head dim {request.head_dim}, {request.num_heads} / "
        f"{request.num_kv_heads} heads, {request.num_rows} rows, {kind}{capped}{ordered}"
    )


def _measured(row: Mapping[str, Any]) -> Measured:
    """Raises TypeError or ValueError for anything that `write` doesn't write."""
    seconds = {case: (float(f), float(b)) for case, (f, b) in row["seconds"].items()}
    problem = row["problem"]
    if not (problem is None or isinstance(problem, str)) or not (seconds or problem):
        raise ValueError(f"not a measurement: {row}")
    return Measured(seconds, problem)
