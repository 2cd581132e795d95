"""Commands keep what Python compiles, where it would be compiled again in each process.

It goes to the user's caches, as PYTHONPYCACHEPREFIX lets it, where the folders of the packages
can't have it or must not (`longctx_patch.diagnosis.bytecode`).
"""

import os
import sys

from longctx_patch.diagnosis.bytecode import compiled_each_time, kept_bytecode


def keep_bytecode() -> None:
    """Have this process and its children keep it, from the next import on.

    Nothing changes where Python keeps it already, where PYTHONPYCACHEPREFIX is set, and where the
    user's caches can't be written.
    """
    if sys.pycache_prefix is not None or not compiled_each_time():
        return
    folder = kept_bytecode()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
