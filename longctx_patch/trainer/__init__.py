"""Under Hugging Face's Trainer and its subclasses: a sequence group is one replica to them."""

from longctx_patch.trainer.mixin import LongContextTrainer, LongContextTrainerMixin
from longctx_patch.trainer.parallelism import TrainerParallelism, trainer_parallelism

__all__ = [
    "LongContextTrainer",
    "LongContextTrainerMixin",
    "TrainerParallelism",
    "trainer_parallelism",
]
