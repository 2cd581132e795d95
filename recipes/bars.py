"""A progress bar that stays readable in a file."""

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

SECONDS_BETWEEN_LINES = 30


class ProgressBar(tqdm):
    """tqdm's bar on a terminal; elsewhere a line every half a minute, and one at the end."""

    def __init__(self, **options: Any) -> None:
        if not sys.stderr.isatty():
            often = SECONDS_BETWEEN_LINES
            options |= {"mininterval": often, "maxinterval": often}
        super().__init__(**options)

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        if file.isatty():
            printer: Callable[[str], None] = tqdm.status_printer(file)
            return printer
        return lambda line: print(line, file=file, flush=True)
