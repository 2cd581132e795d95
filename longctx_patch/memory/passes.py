"""Records of training passes, from which `auto` decides, and of the memory that they took."""

from dataclasses import dataclass

from longctx_patch.memory.ladder import Extra

RECENT, SHORT = 8, 2
"""Memory is short if the allocator had to try again in `SHORT` or more of the last `RECENT` passes.
A single one may come from a change in how its memory is laid out."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The measured memory, and the memory that it is compared with."""

    num_tokens: int
    """Tokens of the longest training pass: rows times tokens of the whole sequence."""
    peak_bytes: int
    """Peak of forward and backward under the present policies; a bound until such a pass is
    over."""
    extra_bytes: tuple[Extra, ...]
    """The bytes that each layer keeps on each rung, first layer to last."""
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What a pass through all layers takes, as a few of them have shown; all are alike."""

    extra_bytes: Extra
    """The bytes that each layer keeps on each rung."""
    host_layers: int
    """The number of layers for which the host has room."""
    peak_bytes: int
    """Peak with the last layer on the highest rung, as many of the first layers on the lowest as
    the host has room for, and the others on the middle one."""
    rest_bytes: int
    """Bytes that are allocated when such a pass begins."""


@dataclass(eq=False)
class Pass:
    """A training pass whose backward is not over."""

    number: int
    num_tokens: int
    window: "Window"
    rest_bytes: int
    peak_before_bytes: int


@dataclass(eq=False)
class Window:
    """The passes since policies changed."""

    peak_bytes: int
    """The expected peak until one was observed, the observed one from then on."""
    rest_bytes: int
    """The most that was allocated at the start of the passes that showed the peak."""
    is_observed: bool = False
    """True once the backward of a longest pass was seen."""
    is_rehearsed: bool = False
    """True if a rehearsal gave the peak instead."""
    at_once: int = 1
    """Passes whose activations are alive at the same time; extras count for each."""
    recent: tuple[bool, ...] = ()
    """For each of the last passes, whether the allocator had to try again."""

    @property
    def is_short(self) -> bool:
        """Says whether the allocator had to try again too often."""
        return sum(self.recent) >= SHORT
