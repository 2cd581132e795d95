"""The model that all systems train, with random weights that are the same in every process."""

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from systems import CHECKED_PARTS, mean_loss, next_tokens

SEED = 0
KERNEL_NAMES = ("rope", "swiglu", "rms_norm")


def make_model(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    torch.manual_seed(SEED)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.train()


def random_row(num_tokens: int, vocab_size: int, device: torch.device) -> Tensor:
    """int64 `[1, N]`, the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocab_size, (1, num_tokens), generator=generator).to(device)


def checkpoint_layers(model: PreTrainedModel, *, offload: bool = False) -> None:
    """transformers' own checkpointing of every layer; `offload` keeps their inputs on the host."""
    # The method has this name since transformers 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False}, offload=offload)


def use_options(model: nn.Module, loss: str = "logits", *, liger: bool) -> None:
    """Liger Kernel's layers or its loss (with them), or the head of TRL's SFTTrainer."""
    if liger or loss == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            model=model,
            **dict.fromkeys(KERNEL_NAMES, True),
            cross_entropy=False,
            fused_linear_cross_entropy=loss == "liger",
        )
    if loss == "trl":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)


def checked_names(model: nn.Module, num_layers: int) -> list[str]:
    """Parameters of the first and last layer whose gradients show whether what mixes their tokens
    is right."""
    layers = sorted({0, num_layers - 1})
    wanted = {f"model.layers.{layer}.{part}" for layer in layers for part in CHECKED_PARTS}
    return [name for name, _ in model.named_parameters() if name in wanted]


def one_process(model: nn.Module, row: Tensor, num_layers: int) -> dict[str, float]:
    """Loss and gradient norms of the plain model on the whole row. Leaves no gradients."""
    logits = model(input_ids=row, use_cache=False).logits.float()
    loss = mean_loss(logits, next_tokens(row), row.shape[1], 1)
    names, parameters = checked_names(model, num_layers), dict(model.named_parameters())
    # Not backward: the gradients of all weights may be more than the GPU holds beside these.
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names])
    norms = [float(torch.linalg.vector_norm(gradient.float())) for gradient in gradients]
    return {"loss": float(loss.detach()), **dict(zip(names, norms, strict=True))}
