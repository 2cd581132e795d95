"""A sentinel beside a trainer's steps: every so many of them, the beginning of one document of the
step's batch is computed over the ranks of its group and by each rank alone.

It looks with the weights after the step, and before anything of it is saved.
"""

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longctx_patch.health.sentinel import TOKENS, Sentinel
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.plugin.together import of_all_ranks
from longctx_patch.trainer.documents import documents_of
from longctx_patch.trainer.log_entries import add_entry

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

logger = logging.getLogger(__name__)

ERROR = "sentinel_error"
"""Key of an entry of the trainer's log: how far both ways were apart."""
_NO_ROWS = "the batch has no rows of input_ids with two tokens or more"
_MASKED = "the model was patched with a mask, which one rank alone does not see"


class SentinelMixin(_Trainer):
    """The overrides that keep a document of a step, and look at it after the step."""

    long_context_handle: PatchHandle
    _sentinel_every: int
    _sentinel: Sentinel | None = None
    _batch: dict[str, Any] | None = None
    """The first of the step that is computed, where the sentinel looks after it."""
    _has_said_why_not = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's `train`. Raises DriftError on all ranks, where the ranks that share a row
        compute other numbers than one of them alone, twice in a row."""
        self._sentinel = self._batch = None
        return super().train(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sentinel_every and model.training and self._batch is None:
            is_due = (self.state.global_step + 1) % self._sentinel_every == 0
            self._batch = dict(inputs) if is_due else None
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            self._look(batch)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _look(self, batch: dict[str, Any]) -> None:
        """Collective: all ranks look, or none does."""
        document = next((d for d in documents_of(batch) if len(d) > 1), None)
        mine = _NO_ROWS if document is None else ""
        if self.long_context_handle.mask is not None:
            mine = _MASKED
        why_not = next(filter(None, of_all_ranks(mine)), "")
        if not why_not and document is not None:
            self._compare(document[:TOKENS])
        elif not self._has_said_why_not:
            self._has_said_why_not = True
            if self.args.should_log:
                text = "sentinel_every=%d: nothing is compared at step %d and alike: %s"
                logger.warning(text, self._sentinel_every, self.state.global_step, why_not)

    def _compare(self, ids: Tensor) -> None:
        if self._sentinel is None:
            self._sentinel = Sentinel(self.long_context_handle, self.model_wrapped)
        drift, step = self._sentinel.check(ids), self.state.global_step
        if self.args.should_log and not drift.is_within:
            logger.warning("step %d: %s", step, drift)
        add_entry(self, {ERROR: drift.error}, step)
