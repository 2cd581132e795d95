"""Copies of a patched model, by `copy.deepcopy`, `pickle` or a process of its own, are refused.

They would have the hooks and process groups of this one.
"""

from collections.abc import Callable
from typing import NoReturn

from torch import nn

NO_COPY = (
    "a patched model can't be copied or pickled: the copy would have the hooks and process groups "
    "of this one. Copy it before patch() or after unpatch(). To keep it, save its weights: "
    "model.save_pretrained(FOLDER), or torch.save(model.state_dict(), FILE) in place of "
    "torch.save(model, FILE). For another process, load the model and patch it there."
)
_HOOK = "__reduce_ex__"
"""What `pickle` and `copy.deepcopy` ask an object for, before they look at what it holds."""


def refuse_copies(model: nn.Module) -> Callable[[], None]:
    """Let both raise ValueError; return a function that undoes it."""

    def refuse(*_: object) -> NoReturn:
        raise ValueError(NO_COPY)

    vars(model)[_HOOK] = refuse

    def undo() -> None:
        del vars(model)[_HOOK]

    return undo
