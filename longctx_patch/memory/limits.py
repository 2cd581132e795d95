"""Shares of a memory that may be filled; the planner uses these numbers too."""

MARGIN = 0.06
"""Share of a device's capacity that `auto` leaves free: for fragments that the allocator can't use,
for passes that need more than those measured (other documents, experts with more tokens), and for
libraries that allocate for themselves. Layers step down when half of the margin is used."""

RESERVE = 0.05
"""Share of the machine's host memory that is left to other programs."""

AHEAD = 1 / 16
"""Share of the device's memory that one layer's tensors may take when they come back from the host
while the layer after it is still in backward."""

TILE = 1 / 16
"""Share of the device's memory that the intermediates of one MLP tile may take. Backward of a tile
holds about twice as much for a moment: the intermediates and their gradients."""


def tiles_that_fit(num_bytes: int, device_bytes: int | None) -> int:
    """The fewest tiles of an MLP with `num_bytes` of intermediates in all, each within `TILE`.

    `device_bytes` is None where torch does not count memory: one tile is enough then.

    Example:
        >>> tiles_that_fit(10 * 2**30, 80 * 2**30), tiles_that_fit(2**30, 80 * 2**30)
        (2, 1)
    """
    if device_bytes is None:
        return 1
    return max(1, -(-num_bytes // int(TILE * device_bytes)))
