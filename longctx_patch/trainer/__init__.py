"""Under Hugging Face's Trainer and its subclasses: a sequence group is one replica to them."""

from longctx_patch.trainer.axis import TrainerParallelism, trainer_parallelism
from longctx_patch.trainer.mixin import LongContextTrainer, LongContextTrainerMixin

__all__ = [
    "LongContextTrainer",
    "LongContextTrainerMixin",
    "TrainerParallelism",
    "trainer_parallelism",
]
