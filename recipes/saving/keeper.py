"""Saves the steps of one run as it goes, and deletes what is no longer to be kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longctx_patch.checkpoints.names import Series
from longctx_patch.checkpoints.retention import Retention, delete_old
from longctx_patch.plugin.together import own_rank

from .state import TrainState
from .writing import save_checkpoint


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """The checkpoints of one run."""

    series: Series
    run: Mapping[str, Any]
    """The run's fingerprint."""
    export: Callable[[Path], None]
    """Writes the model as plain libraries load it; collective."""
    retention: Retention

    def save(self, state: TrainState) -> Path:
        """Write the checkpoint of `state.step`; every process calls this. Older ones go only when
        it is complete on disk. Returns its folder."""
        folder = self.series.path_of(state.step)
        save_checkpoint(state, folder, self.run, self.export)
        if own_rank() == 0:
            delete_old(self.series, self.retention)
        return folder
