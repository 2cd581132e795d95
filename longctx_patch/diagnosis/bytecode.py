"""Whether each process compiles the source of the packages that it imports.

Python keeps what it compiles beside the source, and takes it back in the next process. Images of
containers often lack these files (an installer that does not compile), and Python can't write them
where the folder is read-only, or PYTHONDONTWRITEBYTECODE is set: then imports take several times as
long, in every process.
"""

import os
import sys
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path

from longctx_patch.diagnosis.check import Check
from longctx_patch.user_cache import user_cache

_MODULES = {
    "torch": ("__init__.py", "_dynamo/symbolic_convert.py", "distributed/tensor/_api.py"),
    "sympy": ("__init__.py", "core/expr.py"),
    "transformers": ("__init__.py", "modeling_utils.py"),
    "pandas": ("__init__.py", "core/frame.py"),
}
"""Some of what every start imports: a package's first file, which whoever built an image may have
imported, and one that only training needs."""
_HASHED = 1


def kept_bytecode() -> Path:
    """Where the commands of `longctx` keep it instead."""
    return user_cache() / "bytecode"


def compiled_each_time() -> list[Path]:
    """Folders of packages whose source any process compiles that imports them, unless it is told
    of another place to keep it (PYTHONPYCACHEPREFIX)."""
    found = {name: _folder(name) for name in _MODULES}
    return [
        folder
        for name, folder in found.items()
        if folder is not None and any(_is_lost(folder / file) for file in _MODULES[name])
    ]


def check_bytecode(found: list[Path], prefix: str | None) -> Check:
    """Whether imports are as fast as they can be.

    Args:
        found: what `compiled_each_time` has found.
        prefix: `sys.pycache_prefix`.
    """
    kept = str(kept_bytecode())
    if not found or prefix not in (None, kept):
        return Check("bytecode", "ok", "what is imported was compiled once")
    names = ", ".join(folder.name for folder in found)
    text = f"each process that imports {names} compiles them"
    text += f" (not longctx's commands, which keep it in {kept})" * (prefix is not None)
    parents = sorted({str(folder.parent) for folder in found})
    return Check("bytecode", "warning", text, f"python -m compileall -q -j 0 {' '.join(parents)}")


def _folder(package: str) -> Path | None:
    """Where it is, without importing it."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _is_lost(source: Path) -> bool:
    """Whether what a process compiles of this file is neither there already nor kept."""
    if not source.is_file():  # in this version of the package
        return False
    compiled = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
    return not _is_of(compiled, source) and not _can_write(compiled)


def _is_of(compiled: Path, source: Path) -> bool:
    """Whether Python would take the compiled file for the source (PEP 552)."""
    try:
        with compiled.open("rb") as file:
            magic, flags, seconds, size = (file.read(4) for _ in range(4))
    except OSError:
        return False
    if magic != MAGIC_NUMBER or int.from_bytes(flags, "little") & _HASHED:
        return magic == MAGIC_NUMBER
    state = source.stat()
    known = int.from_bytes(seconds, "little"), int.from_bytes(size, "little")
    return known == (int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF)


def _can_write(path: Path) -> bool:
    there = next(folder for folder in path.parents if folder.exists())
    return not sys.flags.dont_write_bytecode and os.access(there, os.W_OK)
