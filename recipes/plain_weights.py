"""Weights in the checkpoints of recipes: as `final/` has them, for plain transformers and peft."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from longctx_patch.checkpoints.states import read_whole_weights
from longctx_patch.recipes.exporting import write_model
from longctx_patch.trainer.saved_states import STATES, SavedStatesMixin

if TYPE_CHECKING:
    _Trainer = SavedStatesMixin
else:
    _Trainer = object


class PlainWeights(_Trainer):
    """Mixed into a recipe's trainer: before `LongContextTrainerMixin`."""

    _tokenizer: Any = None
    """Saved beside the weights; None: the trainer's own."""

    def _whole(self, asked: str | None) -> str | None:
        """`Output.find` has checked the checkpoint before the model was built."""
        return asked

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Weights from the states as they were written: so no device gathers them, and the training
        may go on."""
        if self._tensors is None or output_dir is None:
            return super()._save(output_dir, state_dict)
        if self.args.should_save:
            weights = self._tensors["model"]
            self._late.append(partial(self._write_model, Path(output_dir), weights))
        if self.args.save_only_model and not self._is_late:
            self._write_now()

    def _write_model(self, folder: Path, weights: Any, _: ProcessGroup | None) -> None:
        if not self.args.save_only_model:
            weights = read_whole_weights(weights, folder / STATES, {})
        tokenizer = self._tokenizer or self.processing_class
        write_model(self.model, tokenizer, folder, weights, seed=self.args.seed)
