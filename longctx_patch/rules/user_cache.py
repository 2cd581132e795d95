"""Finds the folder of files that any run of this machine's user may make again."""

import os
from pathlib import Path


def user_cache() -> Path:
    """The package's folder among a user's caches (XDG Base Directory Specification)."""
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() / "longctx_patch"
