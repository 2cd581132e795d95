"""Record what costs much in a checkpointed forward, replay it in the recompute.

The pair of context managers that `checkpoint_contexts` returns is what torch's non-reentrant
checkpoint takes as `context_fn`. While recording, attention keeps (out, lse) in a frame; while
replaying it takes them back, and neither its kernel nor its communication runs again. This is the
rematerialisation-aware checkpointing of DISTFLASHATTN (section 3.3) without moving the boundaries
of the checkpointed layers. A frame may keep attention's results for a share of the tokens only
(`longctx_patch.engine.selective`). Recurrent layers keep what came of other ranks, whatever the
share, so that their recompute waits for none (`longctx_patch.engine.chain.hand_over`).

Both runs of a region keep and take in the order of their program, of which a recompute may run a
part only: torch stops it once it has all that backward needs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

from torch import Tensor

Getter = Callable[[], Tensor]
"""Returns a kept tensor, as often as it is called."""


def as_it_is(tensor: Tensor) -> Getter:
    """Keep a tensor on its device."""
    return lambda: tensor


@dataclass
class Frame:
    """The results that were kept inside one checkpointed region, in order."""

    store: Callable[[Tensor], Getter] = as_it_is
    """Keeps a tensor, and returns a function that gives it back."""
    share: float = 1.0
    """Share of the row's tokens whose results of attention are kept."""
    kept: list[tuple[Getter, ...]] = field(default_factory=list)
    """The results of each call to `keep`, which may have kept nothing."""
    replaying: bool = False
    next_call: int = 0

    def keep(self, *results: Tensor) -> None:
        # Detached: the returned tensors carry the graph, and the graph carries this frame.
        stored: dict[tuple[object, ...], Getter] = {}
        for tensor in results:  # a tensor that comes twice is stored once
            if _place(tensor) not in stored:
                stored[_place(tensor)] = self.store(tensor.detach())
        self.kept.append(tuple(stored[_place(tensor)] for tensor in results))

    def take(self) -> tuple[Tensor, ...]:
        assert self.next_call < len(self.kept), "the recompute takes more than forward has kept"
        self.next_call += 1
        getters = self.kept[self.next_call - 1]
        tensors = {getter: getter() for getter in set(getters)}
        return tuple(tensors[getter] for getter in getters)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


# Set in the thread that runs the region: on CUDA the recompute happens in autograd's own thread,
# which enters the context there.
_frame: ContextVar[Frame | None] = ContextVar("longctx_patch_frame", default=None)


def current_frame() -> Frame | None:
    """The frame of the checkpointed region that is running, if its policy keeps attention."""
    return _frame.get()


def checkpoint_contexts(
    store: Callable[[Tensor], Getter] = as_it_is, share: float = 1.0
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."""
    frame = Frame(store, share)
    return _Inside(frame, replaying=False), _Inside(frame, replaying=True)


class _Inside(AbstractContextManager[None]):
    """Makes a frame the current one; entered again for each backward over the same graph."""

    def __init__(self, frame: Frame, *, replaying: bool) -> None:
        self._frame = frame
        self._replaying = replaying
        self._tokens: list[Token[Frame | None]] = []

    def __enter__(self) -> None:
        self._frame.replaying = self._replaying
        self._frame.next_call = 0
        self._tokens.append(_frame.set(self._frame))

    def __exit__(self, *_: object) -> None:
        _frame.reset(self._tokens.pop())
