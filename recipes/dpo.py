"""Direct preference optimisation over TRL's DPOTrainer: pairs of a chosen and a rejected answer.

    accelerate launch --config_file run/accelerate.yaml \
        -m longctx_patch.recipes.dpo --config run/dpo.yaml

The settings are those of `trl_settings.TrlSettings` and of TRL's DPOConfig. The reference is the
model as it was: with an adapter the model with its adapter off, else a second copy.
"""

from typing import Any

from trl import DPOConfig, DPOTrainer

from longctx_patch import LongContextTrainerMixin
from longctx_patch.recipes.launch import one_message
from longctx_patch.recipes.trl_run import Method, run
from longctx_patch.recipes.trl_totals import WholeRunTotals


class LongContextDPOTrainer(WholeRunTotals, LongContextTrainerMixin, DPOTrainer):
    """TRL's DPOTrainer over sharded sequences, on rows that are tokens already."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


METHOD = Method("dpo", DPOConfig, LongContextDPOTrainer, compares=True)


def main(arguments: Any = None) -> None:
    """Run from command-line arguments; every process of the job runs this."""
    run(METHOD, arguments)


if __name__ == "__main__":
    with one_message("dpo"):
        main()
