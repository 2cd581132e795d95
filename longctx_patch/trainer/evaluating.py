"""The overrides by which a trainer evaluates and predicts, with each row once for each group."""

from collections.abc import Callable
from contextlib import ExitStack
from math import ceil
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.trainer_pt_utils import find_batch_size

from longctx_patch.hf.handle import PatchHandle
from longctx_patch.rules.together import refuse_together
from longctx_patch.trainer.axis import num_processes
from longctx_patch.trainer.evaluation import (
    GroupGather,
    evaluation_problems,
    logits_problem,
    prepared_for_evaluation_alone,
)
from longctx_patch.trainer.images import require_images_alike
from longctx_patch.trainer.refusals import (
    explains_missing_logits,
    refuse_shards,
    shared_cache_problems,
)

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class EvaluationMixin(_Trainer):
    """Gathers what ranks of a group share once, and counts steps by groups."""

    long_context_handle: PatchHandle
    _gather: GroupGather
    _steps_evaluated: int | None = None
    """How many steps the last evaluation took, until its speed is logged."""

    @property
    def gather_function(self) -> Callable[..., Any]:
        """Gathers each row once. What transformers sets here, before and after each evaluation,
        would gather it once per rank."""
        return self._gather_rows

    @gather_function.setter
    def gather_function(self, _: Callable[..., Any]) -> None:
        pass

    def _gather_rows(self, data: Any) -> Any:
        return self._gather.once(data, self.args.eval_use_gather_object)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' loop; the ranks of a group share each batch that has labels. Raises
        ValueError for what can't be evaluated exactly."""
        num_groups = num_processes() // self.long_context_handle.config.sequence_degree
        if self.long_context_handle.config.sequence_degree > 1:
            dataloader = kwargs.get("dataloader") or args[0]
            refuse_together(evaluation_problems(self.accelerator, dataloader.dataset, num_groups))
        with ExitStack() as stack:
            stack.callback(setattr, self._gather, "rows_of_batch", None)
            stack.enter_context(self.long_context_handle.sharing_evaluation())
            stack.enter_context(prepared_for_evaluation_alone(self.accelerator, self.model))
            output = super().evaluation_loop(*args, **kwargs)
        rows_of_step = self.args.eval_batch_size * num_groups
        self._steps_evaluated = ceil(output.num_samples / rows_of_step)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """transformers' log; what follows an evaluation counts its steps as groups do."""
        self._settle_speed(logs)
        super().log(logs, start_time)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' predictions, with the metrics of groups."""
        output = super().predict(*args, **kwargs)
        self._settle_speed(output.metrics)
        return output

    def _settle_speed(self, metrics: dict[str, float]) -> None:
        """transformers divides the rows of an evaluation by its processes to count steps."""
        num_steps, self._steps_evaluated = self._steps_evaluated, None
        if num_steps is None:
            return
        for name in metrics:
            if name.endswith("_steps_per_second"):
                runtime = metrics[name.replace("steps_per_second", "runtime")]
                metrics[name] = round(num_steps / runtime, 3)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """transformers' step. Raises ValueError for logits of whole rows that can't be had."""
        refuse_shards([inputs])
        require_images_alike(self, inputs)
        self._gather.rows_of_batch = find_batch_size(inputs)
        config = self.long_context_handle.config
        if not prediction_loss_only and config.sequence_degree > 1:
            vocabulary = self.long_context_handle.model.config.get_text_config().vocab_size
            problem = logits_problem(inputs, vocabulary, config.loss)
            if problem is not None:
                raise ValueError(problem)
        with explains_missing_logits(config):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's numbers of each row, which it puts beside the rows of a dataset."""
        refuse_together(shared_cache_problems(dataset))
        self.accelerator.gather_for_metrics = self._gather.once
        try:
            with self.long_context_handle.sharing_evaluation():
                return super()._precompute_ref_logps(dataset, *args, **kwargs)
        finally:
            self.accelerator.gather_for_metrics = self._gather.repeated
