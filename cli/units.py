"""Sizes as people read them."""


def size_text(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB below one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"
