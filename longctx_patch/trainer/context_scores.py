"""A callback that evaluates a trainer's model on long contexts, every so many steps."""

from typing import Any

from transformers import TrainerCallback

from longctx_patch.evaluation.context_evaluation import ContextEvaluation, PreparedEvaluation
from longctx_patch.evaluation.scores import ContextScores
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.rules.together import refuse_together
from longctx_patch.trainer.log_entries import add_entry

PREFIX = "eval_context"
_NO_HANDLE = (
    "this trainer has no LongContextTrainerMixin: give ContextEvaluationCallback the handle that "
    "patch(model, config) returned, as handle=."
)


class ContextEvaluationCallback(TrainerCallback):
    """Evaluates the trained model on long contexts after every `every` steps.

    The scores go into the trainer's log, on all processes: `eval_context/passkey/65536`, the mean
    over depths; `eval_context/loss/32768-65536`, by position; `eval_context/longppl`. All else of
    the training stays as it is without the callback.

    Args:
        trainer: to whose callbacks this one is added.
        asked: what is evaluated, the same on every process.
        every: steps between two evaluations.
        handle: of the trainer's model, for a trainer without `LongContextTrainerMixin`.
        tokenizer: None for the trainer's own.

    Attributes:
        scores: of each evaluation so far, by step.

    Raises:
        ValueError: for `every`; on all processes, as training begins, for what can't be evaluated.

    Example:
        >>> asked = ContextEvaluation(lengths=(8192, 65536), tasks=("passkey",))
        >>> callback = ContextEvaluationCallback(trainer, asked, every=50)  # doctest: +SKIP
        >>> trainer.add_callback(callback)  # doctest: +SKIP
    """

    def __init__(
        self,
        trainer: Any,
        asked: ContextEvaluation,
        *,
        every: int,
        handle: PatchHandle | None = None,
        tokenizer: Any = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: give a number of steps, 1 or more.")
        self.scores: dict[int, ContextScores] = {}
        self._trainer, self._asked, self._every, self._handle = trainer, asked, every, handle
        self._tokenizer = tokenizer
        self._prepared: PreparedEvaluation | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        handle = self._handle or getattr(trainer, "long_context_handle", None)
        refuse_together([] if handle else [_NO_HANDLE])
        assert handle is not None
        tokenizer = self._tokenizer or trainer.processing_class
        self._prepared = PreparedEvaluation(handle, tokenizer, self._asked)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._prepared is None or not self.is_due(state):
            return
        watchdog = getattr(self._trainer, "_watchdog", None)
        found = self._prepared.run(self._trainer.model_wrapped, watchdog=watchdog, say=_nothing)
        self.scores[state.global_step] = found
        add_entry(self._trainer, entry_of(found), state.global_step)

    def is_due(self, state: Any) -> bool:
        """Says whether the step that has ended is one after which the model is evaluated."""
        return bool(state.global_step % self._every == 0)


def entry_of(scores: ContextScores) -> dict[str, float]:
    """Scores as an entry of a log."""
    said = {
        f"{PREFIX}/{name}/{length}": task.at(length)
        for name, task in scores.tasks.items()
        for length in sorted({cell.length for cell in task.cells})
    }
    if (losses := scores.loss_by_position) is not None:
        for start, stop, loss in zip(losses.edges, losses.edges[1:], losses.loss, strict=False):
            if loss is not None:
                said[f"{PREFIX}/loss/{start}-{stop}"] = loss
    if scores.longppl is not None and scores.longppl.longppl is not None:
        said[f"{PREFIX}/longppl"] = scores.longppl.longppl
    return said


def _nothing(_: str) -> None:
    """Says nothing: the log has the scores."""
