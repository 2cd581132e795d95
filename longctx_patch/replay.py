"""Record attention's results in a checkpointed forward, replay them in the recompute.

The pair of context managers that `checkpoint_contexts` returns is what torch's non-reentrant
checkpoint takes as `context_fn`. While recording, attention keeps (out, lse) in a frame; while
replaying it takes them back, and neither its kernel nor its communication runs again. This is the
rematerialisation-aware checkpointing of DISTFLASHATTN (section 3.3) without moving the boundaries
of the checkpointed layers.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

Kept = tuple[Tensor, Tensor]


@dataclass
class Frame:
    """Results of the attention calls inside one checkpointed region, in order."""

    kept: list[Kept] = field(default_factory=list)
    replaying: bool = False
    next_call: int = 0

    def keep(self, out: Tensor, lse: Tensor) -> None:
        # Detached: the returned tensors carry the graph, and the graph carries this frame.
        self.kept.append((out.detach(), lse.detach()))

    def take(self) -> Kept:
        assert self.next_call < len(self.kept), "the recompute calls attention more often"
        self.next_call += 1
        return self.kept[self.next_call - 1]


# Set in the thread that runs the region: on CUDA the recompute happens in autograd's own thread,
# which enters the context there.
_frame: ContextVar[Frame | None] = ContextVar("longctx_patch_frame", default=None)


def current_frame() -> Frame | None:
    """The frame of the checkpointed region that is running, if its policy keeps attention."""
    return _frame.get()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."""
    frame = Frame()
    return _inside(frame, replaying=False), _inside(frame, replaying=True)


@contextmanager
def _inside(frame: Frame, *, replaying: bool) -> Iterator[None]:
    frame.replaying = replaying
    frame.next_call = 0
    token = _frame.set(frame)
    try:
        yield
    finally:
        _frame.reset(token)
