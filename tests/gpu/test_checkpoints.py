"""Every checkpoint policy gives the gradients of none, with the kernels of each dtype."""

from typing import Any

import pytest
import torch

from longctx_patch import LongContextConfig, SequenceShardCollator, patch
from longctx_patch.memory.policies import CheckpointPolicy
from tests.hf.tiny import gradients, tiny_model

pytestmark = pytest.mark.gpu

LENGTH, LAYERS = 2048, 4


def trained(checkpoint: CheckpointPolicy, dtype: torch.dtype) -> tuple[float, dict[str, Any]]:
    """(loss, gradients) of one step."""
    torch.manual_seed(0)
    model = tiny_model(num_hidden_layers=LAYERS, dtype=dtype).to("cuda").train()
    config = LongContextConfig(checkpoint=checkpoint)
    handle = patch(model, config)
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    ids = torch.randint(model.config.vocab_size, (LENGTH,))
    batch = {name: value.to("cuda") for name, value in collate([{"input_ids": ids}]).items()}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss), gradients(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpoint", ["full", "attention", "offload", "auto"])
def test_equal_to_no_checkpoint(checkpoint: CheckpointPolicy, dtype: torch.dtype) -> None:
    """FlexAttention, which float32 runs on, makes a graph of its own in forward."""
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    wanted_loss, wanted = trained("none", dtype)
    loss, found = trained(checkpoint, dtype)
    assert loss == pytest.approx(wanted_loss, rel=tolerance)
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, (name, float(error))
