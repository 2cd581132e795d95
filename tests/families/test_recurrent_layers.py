"""Sizes of recurrent layers from a config, against the weights of the layers that it makes."""

import pytest
import torch

from longctx_patch.families.family import RECURRENT
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.hf.model import transformers_api
from tests.hf.tiny import SUPPORTED, featured_model

FAMILIES = [name for name, family in SUPPORTED.items() if set(family.features) & set(RECURRENT)]


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_weights(family: str) -> None:
    with torch.device("meta"):
        model = featured_model(family)
    modules = transformers_api.recurrent_modules(model)
    layers = recurrent_layers(model.config, batch=3, itemsize=2)
    assert layers is not None
    assert layers.num_layers == len(modules)
    convolutions = [part for part in modules[0].modules() if isinstance(part, torch.nn.Conv1d)]
    assert layers.channels == sum(part.in_channels for part in convolutions)
    assert {layers.reach + 1} == {part.kernel_size[0] for part in convolutions}
    assert layers.channel_bytes == 6
    decays = {n: w for n, w in modules[0].named_parameters() if n.endswith(("A_log", "dt_bias"))}
    if layers.recurrence is None:
        assert not decays
        return
    by_head = [weight for name, weight in decays.items() if name.endswith("A_log")]
    assert [weight.numel() for weight in by_head] == [layers.recurrence.num_heads]
    numbers = layers.recurrence.num_heads * layers.recurrence.value_dim
    (out,) = [
        part
        for name, part in modules[0].named_modules()
        if name in ("out_proj", "o_proj") and isinstance(part, torch.nn.Linear)
    ]
    assert out.in_features == numbers


def test_models_without_them_have_none() -> None:
    assert recurrent_layers(featured_model("llama").config) is None
