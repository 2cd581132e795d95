"""Tasks over a long context, evaluated at steps of a training and at its end: into the metrics, and
with all cells into `eval/step-N/scores.json` of the output."""

from pathlib import Path
from typing import Any

from longctx_patch.evaluation.context_evaluation import ContextEvaluation, PreparedEvaluation
from longctx_patch.evaluation.scores import ContextScores
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.recipes.evaluate import tasks_of, tasks_problem, write_scores
from longctx_patch.recipes.settings import ModelSettings
from longctx_patch.rules.together import own_rank
from longctx_patch.trainer.context_scores import ContextEvaluationCallback, entry_of


def asked_of(settings: ModelSettings) -> ContextEvaluation:
    """What is evaluated at steps of a run."""
    return ContextEvaluation(
        lengths=settings.context_lengths,
        tasks=tasks_of(settings.eval_context_tasks),
        samples=settings.eval_context_samples,
        label="run",
    )


def check_tasks(settings: ModelSettings, tokenizer: Any) -> None:
    """Raise ValueError, before weights are read, for tasks that can't be made at some length."""
    if not settings.eval_context_steps:
        return
    if problem := tasks_problem(asked_of(settings), tokenizer, "--eval-context-tasks"):
        raise ValueError(problem)


def write_step(output: Path, step: int, scores: ContextScores) -> None:
    """Write the scores of a step; the first rank does."""
    if own_rank() == 0:
        (folder := output / "eval" / f"step-{step}").mkdir(parents=True, exist_ok=True)
        write_scores(folder, [{"notes": [f"step {step}"], "scores": scores.as_json()}])


class ContextSteps:
    """Evaluates a model that the text recipe trains."""

    def __init__(self, settings: Any, handle: PatchHandle, tokenizer: Any) -> None:
        """Makes the rows. Collective; raises ValueError on all ranks where none can be made."""
        self._every, self._last = settings.eval_context_steps, settings.max_steps
        self._output = Path(settings.output)
        self._prepared = None
        if self._every:
            self._prepared = PreparedEvaluation(handle, tokenizer, asked_of(settings))

    def numbers(self, model: Any, step: int, watchdog: Any) -> dict[str, float]:
        """What the metrics say where an evaluation is due after `step`. Collective."""
        if self._prepared is None or (step % self._every and step != self._last):
            return {}
        scores = self._prepared.run(model, watchdog=watchdog)
        write_step(self._output, step, scores)
        return entry_of(scores)


class ContextStepsCallback(ContextEvaluationCallback):
    """The same for a trainer."""

    def is_due(self, state: Any) -> bool:
        return super().is_due(state) or state.global_step >= state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_step_end(args, state, control, **more)
        if (found := self.scores.get(state.global_step)) is not None:
            write_step(Path(args.output_dir), state.global_step, found)
