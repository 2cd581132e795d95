"""Models that mix attention with gated delta nets: what a layer of each kind takes of a step."""

from dataclasses import replace
from typing import Any

import pytest

from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.family import DELTA
from longctx_patch.memory.policies import CheckpointPolicy, LayerPolicy
from longctx_patch.planner.layer_bytes import kept_bytes, layer_bytes
from longctx_patch.planner.model_shape import LayerShape, shape_of
from longctx_patch.planner.search import search
from longctx_patch.planner.step_memory import host_bytes, predict_memory
from tests.hf.tiny import SUPPORTED, featured_config
from tests.planner.jobs import candidate, hybrid_job, hybrid_shape, result_of
from tests.planner.test_model_shape import assert_counts_are_of

TOKENS = 2**16


def kinds() -> tuple[LayerShape, LayerShape]:
    """(a gated delta net, a layer with attention)."""
    layers = hybrid_shape().layers
    return layers[0], layers[3]


def test_layers_are_in_their_order() -> None:
    net, attends = kinds()
    assert hybrid_shape().layers == (net, net, net, attends) * 2
    assert (hybrid_shape().num_recurrent, hybrid_shape().num_attending) == (6, 2)
    assert net.recurrence is not None
    assert attends.recurrence is None
    assert (net.has_gate, attends.has_gate) == (False, True)


@pytest.mark.parametrize(
    "layer_types",
    [
        ["full_attention", "linear_attention"],
        ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ],
)
def test_counts_are_those_of_the_model_in_any_order(layer_types: list[str]) -> None:
    for family in ("qwen3_5_text", "olmo_hybrid"):
        sizes: dict[str, Any] = {"layer_types": layer_types, "num_hidden_layers": len(layer_types)}
        assert_counts_are_of(featured_config(family, **sizes))
    assert_counts_are_of(featured_config("qwen3_next", num_experts=0, **sizes))


def test_a_decay_by_channel_is_refused() -> None:
    """Kimi Linear is refused for its experts or its latents first; this is without both."""
    config = featured_config("kimi_linear")
    assert DELTA in SUPPORTED["kimi_linear"].features
    facts = replace(ModelFacts.of(config), experts=None, latent=None)
    assert facts.unpredicted == "layer 0 is linear_attention"


def test_each_policy_meets_the_layer_that_has_it() -> None:
    """What is kept while the loss is computed is the sum over layers, in their order."""
    job = hybrid_job("H200", TOKENS, fsdp=False)
    policies: tuple[LayerPolicy, ...] = ("attention",) * 5 + ("none", "full", "none")
    chosen = result_of(job, ulysses=1, ring=1, checkpoint="auto").candidate
    found = replace(chosen, policies=policies)
    of_kind = {kind: layer_bytes(job, found, kind) for kind in job.shape.kinds}
    kept = sum(
        kept_bytes(policy, found, of_kind[kind])
        for kind, policy in zip(job.shape.layers, policies, strict=True)
    )
    assert predict_memory(job, found, TOKENS, 0).checkpoints == TOKENS * kept
    net, attends = (of_kind[kind] for kind in kinds())
    assert (net.results, attends.results) == (0, 2 * 4096 + 4 * 16)
    assert kept_bytes("attention", found, net) == 2 * 4096  # a recompute runs it again
    assert net.whole > attends.whole


def test_layers_on_the_host_are_counted_there() -> None:
    job = hybrid_job("2xH200", TOKENS)
    policies: tuple[LayerPolicy, ...] = ("offload",) * 4 + ("attention",) * 4
    found = replace(candidate(8), policies=policies)
    # Three nets leave their input; the layer with attention its output and lse, too.
    per_token = 4 * 2 * 4096 + 2 * 4096 + 4 * 16
    assert host_bytes(job, found, 1000) == 2 * 1000 * per_token


def test_the_layer_after_which_most_is_held_need_not_be_the_last() -> None:
    """A net holds more than the layer with attention that is last, and is recomputed here."""
    job = hybrid_job("H200", TOKENS, fsdp=False)
    found = result_of(job, ulysses=1, ring=1, checkpoint="attention")
    net = layer_bytes(job, found.candidate, kinds()[0])
    assert found.memory.layer == TOKENS * (net.whole + net.passing)


def test_maps_of_a_zigzag_run_the_kernel_once_more_and_keep_what_it_saves() -> None:
    """The second rank's two segments lie between those of the first, whose last one needs their
    maps. With contiguous shards nobody needs one."""
    job, net = hybrid_job("2xH200", TOKENS), kinds()[0]
    zigzag, contiguous = (
        result_of(job, ulysses=1, ring=2, checkpoint="none", layout=layout).candidate
        for layout in ("zigzag", "contiguous")
    )
    assert zigzag.recurrence is not None
    assert contiguous.recurrence is not None
    assert (zigzag.recurrence.mapped_share, contiguous.recurrence.mapped_share) == (1, 0)
    more = layer_bytes(job, zigzag, net).whole - layer_bytes(job, contiguous, net).whole
    # Queries and keys with their lengths, values with the map's columns, decays, rows of chunks.
    assert more == 2 * 16 * (2 * 128 + 4) + 2 * 32 * 256 + 32 * (4 + 2 * 64)


def test_recurrences_run_again_as_policies_say() -> None:
    job = hybrid_job("2xH200", TOKENS)

    def seconds(checkpoint: CheckpointPolicy) -> float:
        return result_of(job, ulysses=1, ring=2, checkpoint=checkpoint).time.recurrence

    found = result_of(job, ulysses=1, ring=2, checkpoint="none").candidate.recurrence
    assert found is not None
    assert seconds("none") == pytest.approx(6 * found.seconds("none"))
    for checkpoint in ("attention", "offload"):
        assert seconds(checkpoint) == pytest.approx(6 * found.seconds("replay"))
    assert seconds("full") == pytest.approx(6 * found.seconds("whole"))
    assert seconds("none") < seconds("attention") < seconds("full")


def test_flops_by_hand() -> None:
    shape, (net, attends) = hybrid_shape(), kinds()
    assert net.recurrence is not None
    linear = 6 * net.linear_weights + 2 * attends.linear_weights + shape.vocab_size * 4096
    flops = 6 * linear * 1000 + 2 * 6 * 1000**2 * 4096
    assert shape.step_flops(1000) == flops + 6 * 3 * 1000 * net.recurrence.run_flops


def test_an_adapter_lies_beside_the_products_of_both_kinds() -> None:
    job, (net, attends) = hybrid_job("4xH200", TOKENS, lora=True), kinds()
    assert job.trained_weights == 16 * (6 * net.linear_sides + 2 * attends.linear_sides)


def test_a_model_of_recurrent_layers_alone_is_predicted() -> None:
    config = featured_config(
        "qwen3_5_text", layer_types=["linear_attention"] * 2, num_hidden_layers=2
    )
    job = replace(hybrid_job("2xH200", TOKENS), shape=shape_of(config, "nets"))
    for result in search(job):
        assert result.time.attention == 0
        assert result.time.recurrence > 0


def test_whole_layers_are_a_sum_of_tensors_by_hand() -> None:
    """A gated delta net of Qwen3.5-9B with Liger Kernel, in units of the hidden size."""
    net, hidden = layer_bytes(hybrid_job("H100", 2), candidate(8), kinds()[0]), 2 * 4096
    around = 4 * hidden + 2 * 4  # input, two norms' outputs, the sum between, two norms' numbers
    projected = 2 * hidden + 32 * (2 + 4 + 4)  # for the convolution; decays and weights of values
    kernel = 2 * 16 * (2 * 128 + 4) + hidden + 32 * (4 + 2 * 64)
    gated_norm = 9 * hidden + 32 * 4
    assert net.mixer == around + projected + kernel + gated_norm
    assert net.mlp == 3 * 2 * 12288


@pytest.mark.parametrize("checkpoint", ["none", "attention", "offload", "full"])
@pytest.mark.parametrize("lora", [False, True])
def test_more_gpus_never_take_more_of_each(checkpoint: CheckpointPolicy, lora: bool) -> None:
    def peak(gpus: int) -> float:
        job = hybrid_job(f"{gpus}xH200", 2**19, num_layers=32, lora=lora)
        ulysses = min(gpus, 4)
        ring = gpus // ulysses
        return result_of(job, ulysses=ulysses, ring=ring, checkpoint=checkpoint).memory.total

    peaks = [peak(gpus) for gpus in (2, 4, 8, 16, 32)]
    assert peaks == sorted(peaks, reverse=True)
