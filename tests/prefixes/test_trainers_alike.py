"""TRL's trainers compute what rows of a batch share once, and log and learn what they do alone. Two
ranks do so in tests/trl, and 20 steps of all of them in its grid."""

from pathlib import Path
from typing import Any

import pytest

from longctx_patch.hf.model.transformers_api import decoder_layers
from tests.trainer.trained import complaints
from tests.trl.cases import Case, make_trainer, train, write_rows
from tests.trl.grid import BEGIN_ALIKE

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
KINDS = ("SFT of turns", "DPO of one pair", "KTO of answers", "GRPO, twice")


def case_of(kind: str, how: str = "always", steps: int = 4) -> Case:
    trainer, rows, arguments = BEGIN_ALIKE[kind]
    given = arguments | {"max_steps": steps}
    return Case(kind, trainer, rows, {"share_prefixes": how}, arguments=given)


def computed(case: Case, folder: Path) -> int:
    """How many tokens go through the first layer in passes that learn, in a run of training."""
    trainer = make_trainer(case, folder, is_patched=True)
    model, found = trainer.long_context_handle.model, 0

    def count(layer: Any, args: Any, kwargs: Any) -> None:
        nonlocal found
        hidden = args[0] if args else kwargs["hidden_states"]
        found += hidden.shape[:2].numel() * hidden.requires_grad

    decoder_layers(model)[0].register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    trainer.unpatch()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_beginning_is_computed_once(kind: str, tmp_path: Path) -> None:
    write_rows([case_of(kind)], tmp_path)
    folder = tmp_path / kind
    shared, apart = (computed(case_of(kind, how, 2), folder) for how in ("always", "off"))
    assert shared < 0.8 * apart
    mine, stock = (train(case_of(kind), folder, is_patched) for is_patched in (True, False))
    wrong = complaints(mine, stock)
    assert not wrong, "\n".join(wrong)
