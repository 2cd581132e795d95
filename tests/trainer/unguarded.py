"""What a guarded trainer is compared with: one that nothing guards, and that leaves a step out."""

from typing import Any

from transformers import Trainer, TrainerCallback

from longctx_patch import LongContextTrainer


class LeavesOut(TrainerCallback):
    """Makes a trainer leave a step out: an optimizer has nothing to do without gradients."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step + 1 == self._step:
            given["model"].zero_grad()


class Unguarded(LongContextTrainer):
    """Ours with transformers' own methods where steps are checked."""

    training_step = Trainer.training_step
    compute_loss = Trainer.compute_loss
    _get_grad_norm = Trainer._get_grad_norm
