"""Commands keep what Python compiles, where it would be compiled again in each process.

It goes to the user's caches, as PYTHONPYCACHEPREFIX lets it, where the folders of the packages
can't have it or must not (`longctx_patch.diagnosis.bytecode`).
"""

import os
import sys
from pathlib import Path
from stat import S_IWGRP, S_IWOTH

from longctx_patch.diagnosis.bytecode import compiled_each_time, kept_bytecode


def keep_bytecode() -> None:
    """Have this process and its children keep it, from the next import on.

    Nothing changes where Python keeps it already, where PYTHONPYCACHEPREFIX is set, and where the
    user's caches can't be written, or others can write there: what is in them would be run.
    """
    if sys.pycache_prefix is not None or not compiled_each_time():
        return
    folder = kept_bytecode()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    if not _is_of_user_alone(folder):
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _is_of_user_alone(folder: Path) -> bool:
    state = folder.stat()
    return (
        os.access(folder, os.W_OK)
        and state.st_uid == os.getuid()
        and not state.st_mode & (S_IWGRP | S_IWOTH)
    )
