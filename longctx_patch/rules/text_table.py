"""Tables and numbers as a terminal shows them."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, in which every column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def size_text(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB below one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"


def time_text(seconds: float) -> str:
    """Seconds with three digits, in milliseconds below a second."""
    number, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"
