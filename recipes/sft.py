"""Supervised fine-tuning over TRL's SFTTrainer: chats, prompts with completions, texts, tokens.

    accelerate launch --config_file run/accelerate.yaml \
        -m longctx_patch.recipes.sft --config run/sft.yaml

The settings are those of `trl_settings.TrlSettings` and of TRL's SFTConfig. The output folder gets
metrics.jsonl, checkpoint-N/ and final/.
"""

from typing import Any

from trl import SFTConfig, SFTTrainer

from longctx_patch import LongContextTrainerMixin
from longctx_patch.recipes.launch import one_message
from longctx_patch.recipes.trl_run import Method, run
from longctx_patch.recipes.trl_totals import WholeRunTotals


class LongContextSFTTrainer(WholeRunTotals, LongContextTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer over sharded sequences."""


METHOD = Method("sft", SFTConfig, LongContextSFTTrainer)


def main(arguments: Any = None) -> None:
    """Run from command-line arguments; every process of the job runs this."""
    run(METHOD, arguments)


if __name__ == "__main__":
    with one_message("sft"):
        main()
