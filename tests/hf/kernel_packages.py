"""Stand-ins for packages of kernels of recurrent layers."""

from collections.abc import Iterable
from pathlib import Path

from longctx_patch.hf.model.sequence_kernels import KERNELS


def packages(names: Iterable[str] = KERNELS) -> set[str]:
    """Those of these functions of transformers."""
    return {KERNELS[name].module.partition(".")[0] for name in names}


def write_package(folder: Path, package: str) -> None:
    """A package with each kernel that is taken of it."""
    (folder / package).mkdir(exist_ok=True)
    (folder / package / "__init__.py").write_text("")
    for kernel in KERNELS.values():
        first, *rest = kernel.module.split(".")
        if first == package:
            path = folder / package
            for part in rest:
                path /= part
                path.mkdir(exist_ok=True)
                (path / "__init__.py").touch()
            with (path / "__init__.py").open("a") as file:
                file.write(f"def {kernel.name}(*args, **options): ...\n")
