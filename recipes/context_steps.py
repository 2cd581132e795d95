"""Tasks over a long context, evaluated at steps of a training and at its end: into the metrics, and
with all cells into `eval/step-N/scores.json` of the output."""

from pathlib import Path
from typing import Any

from longctx_patch.evaluation.context_evaluation import ContextEvaluation
from longctx_patch.evaluation.scores import ContextScores
from longctx_patch.recipes.evaluate import tasks_of, tasks_problem, write_scores
from longctx_patch.recipes.settings import ModelSettings
from longctx_patch.rules.together import own_rank
from longctx_patch.trainer.context_scores import ContextEvaluationCallback


def asked_of(settings: ModelSettings) -> ContextEvaluation:
    """Returns what is evaluated at steps of a run."""
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


class ContextStepsCallback(ContextEvaluationCallback):
    """Evaluates a recipe's model."""

    def is_due(self, state: Any) -> bool:
        return super().is_due(state) or state.global_step >= state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_step_end(args, state, control, **more)
        if (found := self.scores.get(state.global_step)) is not None:
            write_step(Path(args.output_dir), state.global_step, found)
