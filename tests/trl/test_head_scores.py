"""Which of TRL's losses take log-probabilities from the patched head, and what that saves: their
gradients are made in forward, so that backward computes no product with the vocabulary again."""

from pathlib import Path
from typing import Any

import pytest
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from longctx_patch import LongContextConfig, LongContextTrainerMixin, patch
from longctx_patch.data.whole_rows import HeadScores
from longctx_patch.trainer.head_scores import head_scores
from tests.hf.tiny import featured_model
from tests.trl.cases import Case, make_trainer, write_rows
from tests.trl.test_row_outputs import Products
from tests.trl.test_trainers import ALL_LOSSES, ONE_PAIR

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")


class OwnDPOTrainer(DPOTrainer):
    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super()._compute_loss(*args, **kwargs)


CONFIGS = {
    SFTTrainer: SFTConfig,
    DPOTrainer: DPOConfig,
    OwnDPOTrainer: DPOConfig,
    KTOTrainer: KTOConfig,
    GRPOTrainer: GRPOConfig,
    RLOOTrainer: RLOOConfig,
}
ALL, EACH = HeadScores(), HeadScores(with_mean_logits=True)
BY_ROW = HeadScores(by_row=True, with_mean_logits=True)
TWO_ROWS = {"per_device_train_batch_size": 2}
CASES: list[tuple[type, dict[str, Any], HeadScores | None, HeadScores | None]] = [
    (SFTTrainer, {"loss_type": "nll"}, ALL, ALL),
    (SFTTrainer, {"loss_type": "dft"}, None, None),
    (DPOTrainer, ONE_PAIR | ALL_LOSSES, BY_ROW, EACH),
    (DPOTrainer, TWO_ROWS, None, EACH),
    (DPOTrainer, ONE_PAIR | {"ld_alpha": 0.5}, None, EACH),
    (DPOTrainer, ONE_PAIR | {"use_weighting": True}, None, None),
    (DPOTrainer, ONE_PAIR | {"padding_free": True}, None, None),
    (DPOTrainer, ONE_PAIR | {"loss_type": ["sigmoid", "new"]}, None, None),
    (OwnDPOTrainer, ONE_PAIR, None, None),
    (KTOTrainer, TWO_ROWS, BY_ROW, EACH),
    (KTOTrainer, {"per_device_train_batch_size": 3}, None, EACH),
    (GRPOTrainer, {}, None, ALL),
    (GRPOTrainer, {"temperature": 0.9}, None, None),
    (GRPOTrainer, {"entropy_coef": 0.1}, None, None),
    (GRPOTrainer, {"cast_lm_head_to_fp32": True}, None, None),
    (RLOOTrainer, {}, None, ALL),
]
"""Trainer and arguments; how our head makes scores if it learns, and if it is frozen."""


@pytest.mark.parametrize(("cls", "given", "learning", "frozen"), CASES)
def test_what_is_known_before_forward_decides(
    cls: type,
    given: dict[str, Any],
    learning: HeadScores | None,
    frozen: HeadScores | None,
    tmp_path: Path,
) -> None:
    trainer: Any = object.__new__(type("Patched", (LongContextTrainerMixin, cls), {}))
    usual = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": []}
    trainer.args = CONFIGS[cls](**usual | given)
    model = featured_model("llama")
    trainer.long_context_handle = handle = patch(model, LongContextConfig())
    assert head_scores(trainer) == learning
    model.get_output_embeddings().requires_grad_(False)
    assert head_scores(trainer) == frozen
    model.get_output_embeddings().register_forward_hook(lambda *_: None)
    assert head_scores(trainer) is None
    handle.unpatch()


ONE_STEP = {"max_steps": 1}
COUNTED = [
    (Case("dpo", "dpo", "pairs", {}, arguments=ONE_STEP | ONE_PAIR), 3 + 1),
    (Case("lora", "dpo", "pairs", {}, adapter=True, arguments=ONE_STEP), 2 + 1),
]
"""Products of a step with the vocabulary: of the policy, and of the reference."""


@pytest.mark.parametrize(("case", "wanted"), COUNTED, ids=["dpo", "lora"])
def test_a_step_of_dpo_computes_no_product_again(case: Case, wanted: int, tmp_path: Path) -> None:
    write_rows([case], tmp_path)
    trainer = make_trainer(case, tmp_path / case.name, is_patched=True)
    with Products() as products:
        trainer.train()
    assert products.number == wanted
