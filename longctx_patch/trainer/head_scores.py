"""Says whether the patched head computes what a trainer of TRL asks of TRL's fused head.

Our head makes gradients in forward (`longctx_patch.loss.head_gradients`), so what a trainer will
make of the log-probabilities has to be known before. It is where the trainer's class is TRL's own
and its arguments name a loss that is known here; in all other cases TRL's head runs.
"""

import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from longctx_patch.data.whole_rows import HeadScores
from longctx_patch.hf.loss.lm_head import plain_head

MOST_ROWS = 2
"""Rows in a forward for which a head that learns keeps gradients of its own, in float32."""

_PAIRED = frozenset(
    {
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
        *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    }
)
"""Losses of DPO, all of which read sums or means over the tokens of a row."""
_UNPAIRED = frozenset({"kto", "apo_zero_unpaired"})
"""KTO's losses, which do so too."""
_LOSS_METHODS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")


class _Use(NamedTuple):
    """Says what a trainer makes of log-probabilities."""

    alike: Literal["all", "row", "none"]
    """Which of them surely have the same gradient."""
    most_rows: int = 0
    """Rows of a forward with gradients."""
    reads_mean_logits: bool = False


def scores_of(trainer: Any) -> Callable[[], HeadScores | None]:
    """`head_scores` of a trainer while it lives: its model may outlive it."""
    living = weakref.ref(trainer)

    def now() -> HeadScores | None:
        trainer = living()
        return None if trainer is None else head_scores(trainer)

    return now


def head_scores(trainer: Any) -> HeadScores | None:
    """Returns how the patched head computes the trainer's scores; None: TRL's fused head does.

    The answer is for the trained model and its reference alike, and the same on all processes.
    """
    use = _use(trainer)
    handle = trainer.long_context_handle
    model = handle.model
    if use is None or handle.config.loss != "chunked" or plain_head(model) is None:
        return None
    learns = any(weight.requires_grad for weight in model.get_output_embeddings().parameters())
    by_row = learns and use.alike == "row"
    if (learns and use.alike == "none") or (by_row and use.most_rows > MOST_ROWS):
        return None
    return HeadScores(by_row, use.reads_mean_logits)


def _use(trainer: Any) -> _Use | None:
    """None where it isn't known."""
    name, args = _trl_class(trainer), trainer.args
    if name == "SFTTrainer":
        return _Use("all") if args.loss_type == "nll" else None
    if name == "DPOTrainer":
        return _use_of_dpo(args)
    if name == "KTOTrainer" and args.loss_type in _UNPAIRED:
        return _Use("row", args.per_device_train_batch_size, reads_mean_logits=True)
    if name in ("GRPOTrainer", "RLOOTrainer"):
        return _use_of_generated(args)
    return None


def _use_of_dpo(args: Any) -> _Use | None:
    """`use_weighting` reads a field that our head doesn't make; `ld_alpha` weighs the tokens of a
    row, and rows without padding between them are read as one."""
    types = {args.loss_type} if isinstance(args.loss_type, str) else set(args.loss_type)
    if args.use_weighting or args.padding_free or not types <= _PAIRED:
        return None
    alike: Literal["row", "none"] = "row" if args.ld_alpha is None else "none"
    return _Use(alike, 2 * args.per_device_train_batch_size, reads_mean_logits=True)


def _use_of_generated(args: Any) -> _Use | None:
    """Our head has no temperature, and its entropy no gradient, which a bonus needs."""
    has_bonus = getattr(args, "entropy_coef", 0) or getattr(args, "use_adaptive_entropy", False)
    is_cast = getattr(args, "cast_lm_head_to_fp32", False)
    return None if has_bonus or is_cast or args.temperature != 1 else _Use("none")


def _trl_class(trainer: Any) -> str:
    """Name of the class of TRL that computes the loss; empty where a subclass has a part in it."""
    # Our mixin only hands these methods on.
    classes = [cls for cls in type(trainer).__mro__ if _package(cls) != _package(_Use)]
    found = (next((cls for cls in classes if name in vars(cls)), None) for name in _LOSS_METHODS)
    owners = {owner for owner in found if owner is not None}
    owner = owners.pop()
    return owner.__name__ if not owners and _package(owner) == "trl" else ""


def _package(cls: type) -> str:
    return cls.__module__.split(".")[0]
