"""Entries of a trainer's log beside those that it makes by itself."""

from collections.abc import Mapping
from typing import Any


def add_entry(trainer: Any, said: Mapping[str, Any], step: int) -> None:
    """Put an entry into the log, and tell the callbacks of it.

    Not by `log`, in which TRL's trainers empty what they have counted since the last one; and the
    step's own entry is still to come, where it was.
    """
    will_log = trainer.control.should_log
    trainer.state.log_history.append({**said, "step": step})
    given = (trainer.args, trainer.state, trainer.control, dict(said))
    trainer.control = trainer.callback_handler.on_log(*given)
    trainer.control.should_log = will_log
