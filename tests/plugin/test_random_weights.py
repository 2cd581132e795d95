"""Weights that are drawn on a device, layer after layer: distributed as those of `from_config`, the
same however many processes share the model, and never all there at once."""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from longctx_patch.families.text_part import auto_class
from longctx_patch.plugin import load_sharded, random_weights, unread, unread_model
from longctx_patch.plugin.random_weights import LEFT_AS_MADE, RandomWeights, can_draw, random_model
from tests.harness import run_distributed
from tests.hf.tiny import SUPPORTED, featured_config, tiny_config
from tests.memory.live_bytes import LiveBytes
from tests.plugin.sharded import bits, whole
from tests.plugin.test_unread import shard

CPU = torch.device("cpu")
SIGMAS = 6.0
"""Errors of a mean and a deviation, of thousands of weights that are compared."""


def drawn(config: Any, seed: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights are drawn as on a GPU."""
    torch.manual_seed(seed)
    with mock.patch.object(random_weights, "can_draw", return_value=True):
        return random_model(copy.deepcopy(config), dtype, draw_on=CPU)


def named_bits(model: torch.nn.Module) -> dict[str, Any]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: bits(whole(parameter.detach())) for name, parameter in named}


def assert_alike(found: Tensor, wanted: Tensor, name: str) -> None:
    """Both are samples of one distribution, as far as their means and deviations say."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    spread = max(found.double().std(correction=0), wanted.double().std(correction=0))
    error = SIGMAS * spread / found.numel() ** 0.5 + 1e-7 * wanted.double().abs().max()
    assert abs(found.double().mean() - wanted.double().mean()) <= error, name
    assert abs(found.double().std(correction=0) - wanted.double().std(correction=0)) <= error, name


@pytest.mark.parametrize("family", [f for f in SUPPORTED if f not in LEFT_AS_MADE])
def test_they_are_distributed_as_those_of_from_config(family: str) -> None:
    config = featured_config(family)
    torch.manual_seed(0)
    stock = auto_class(config).from_config(copy.deepcopy(config), dtype=torch.float32)
    found = drawn(config)
    wanted = dict(stock.named_parameters())
    assert dict(found.named_parameters()).keys() == wanted.keys()
    for name, parameter in found.named_parameters():
        assert_alike(parameter.detach(), wanted[name].detach(), name)
        assert parameter.requires_grad == wanted[name].requires_grad
    for name, buffer in stock.named_buffers():
        assert torch.equal(found.get_buffer(name), buffer)


def test_they_follow_the_seed_and_differ_between_layers() -> None:
    config = tiny_config("qwen3")
    first = named_bits(drawn(config))
    assert named_bits(drawn(config)) == first
    other = named_bits(drawn(config, seed=4))
    moved = {name for name in first if first[name] != other[name]}
    assert moved == {name for name in first if "norm" not in name}
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    assert first[names[0]] != first[names[1]]


def test_drawing_leaves_torchs_generator_as_one_number_does() -> None:
    """So that what is drawn afterwards, such as an adapter, depends on the seed alone."""
    drawn(tiny_config("llama"), seed=5)
    found = torch.rand(3)
    torch.manual_seed(5)
    random_weights.drawn_seed()
    assert torch.equal(torch.rand(3), found)


def shared(rank: int, file: str, dtype: torch.dtype) -> dict[str, Any]:
    """The whole weights of a model that all ranks share."""
    torch.manual_seed(3 if rank == 0 else 4)
    with mock.patch.object(unread, "can_draw", return_value=True):
        model = unread_model(file, dtype=dtype, draw_on=CPU)
    state = torch.get_rng_state()
    load_sharded(model, shard, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    return named_bits(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processes", [1, 3])
def test_processes_share_the_weights_of_one(
    dtype: torch.dtype, processes: int, tmp_path: Path
) -> None:
    config = tiny_config("qwen3", tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    wanted = named_bits(drawn(config, dtype=dtype))
    for found in run_distributed(shared, processes, str(tmp_path / "config.json"), dtype):
        assert found == wanted


def test_one_layer_is_there_at_once() -> None:
    config = tiny_config("llama", num_hidden_layers=8, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config)
    layer = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    weights = RandomWeights(config, torch.float32, CPU, 0)
    with LiveBytes() as live:
        for name, _ in model.named_parameters():
            weights.take([name])
    assert layer <= live.top < 2 * layer < 3 * model.num_parameters()


def test_a_weight_without_initial_values_is_refused() -> None:
    weights = RandomWeights(tiny_config("llama"), torch.float32, CPU, 0)
    forget = mock.patch.object(PreTrainedModel, "_init_weights")
    with forget, pytest.raises(ValueError, match=r"lm_head\.weight has no initial values: .*Llama"):
        weights.take(["lm_head.weight"])


@pytest.mark.parametrize("family", LEFT_AS_MADE)
def test_what_only_constructors_initialise_is_made_on_the_cpu(family: str) -> None:
    config = featured_config(family)
    assert not can_draw(config, torch.device("cuda"))
    weights = RandomWeights(config, torch.float32, CPU, 0)
    with pytest.raises(ValueError, match="act_fn"):
        weights.take(["model.layers.0.mlp.act_fn.alpha_p"])


def test_the_cpu_draws_what_from_config_draws() -> None:
    config = tiny_config("llama")
    torch.manual_seed(3)
    wanted = named_bits(AutoModelForCausalLM.from_config(copy.deepcopy(config)))
    torch.manual_seed(3)
    assert named_bits(random_model(config, torch.float32, draw_on=CPU)) == wanted
