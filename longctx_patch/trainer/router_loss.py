"""Says whether TRL may ask a model for the loss of its router."""

from typing import Any

from longctx_patch.hf.model import transformers_api


def router_problems(trainer: Any) -> list[str]:
    """The weight of a loss that the trained model does not have, in words."""
    asked = getattr(trainer.args, "router_aux_loss_coef", None)
    if not asked or has_router_loss(trainer.long_context_handle.model):
        return []
    kind = type(trainer.long_context_handle.model).__name__
    return [f"router_aux_loss_coef={asked:g}: a {kind} has no loss of its router. Leave it out."]


def leave_out_missing_router_loss(trainer: Any) -> None:
    """Train a model without a loss of its router on the loss that it has.

    TRL concludes from the config that there is one: Llama 4's names its weight, but transformers'
    model never computes it.
    """
    model = trainer.long_context_handle.model
    if not getattr(trainer, "aux_loss_enabled", False) or has_router_loss(model):
        return
    trainer.aux_loss_enabled, trainer.router_aux_loss_coef = False, 0.0
    model.config.get_text_config().output_router_logits = False


def has_router_loss(model: Any) -> bool:
    """Says whether transformers' model adds a loss of its router."""
    return hasattr(model, transformers_api.router_weight(model))
