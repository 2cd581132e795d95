"""Predictions that a test makes up replace those of the cost model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

from longctx_patch.choose import compare, degrees, plans
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.predict.attention.costs import Prediction, Workload, predict
from longctx_patch.predict.machines import Hardware
from longctx_patch.predict.run import step_time


@contextmanager
def planted(seconds: Callable[[Setting, Direction], float]) -> Iterator[None]:
    """Inside this context `seconds` is what every chooser predicts for a setting."""

    def believed(
        setting: Setting, direction: Direction, workload: Workload, hardware: Hardware
    ) -> Prediction:
        found = predict(setting, direction, workload, hardware)
        return replace(found, makespan_s=seconds(setting, direction))

    with ExitStack() as stack:
        for module in (compare, degrees, plans, step_time):
            stack.enter_context(patch.object(module, "predict", believed))
        plans.decide.cache_clear()
        stack.callback(plans.decide.cache_clear)
        yield
