"""Policies layer by layer on patched models: no number changes, and `auto` keeps what fits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from longctx_patch.families.facts import ModelFacts
from longctx_patch.hf.model.transformers_api import (
    attention_modules,
    decoder_layers,
    recurrent_modules,
)
from longctx_patch.memory.ladder import MemoryUse
from longctx_patch.memory.limits import MARGIN
from longctx_patch.memory.policies import LayerPolicy
from tests.harness import run_distributed
from tests.hf.tiny import SUPPORTED, featured_model, gradients, tiny_model
from tests.memory.live_bytes import LiveBytes
from tests.memory.test_tiled_mlp_models import FAMILIES, codes_of_mlps
from tests.memory.trained import Trained, assert_equal, averaged, counted_step

LAYERS = 5
PLENTY = 10**12


def deep_model() -> Any:
    return tiny_model(num_hidden_layers=LAYERS)


def last(whole: int) -> list[LayerPolicy]:
    return ["attention" if layer < LAYERS - whole else "none" for layer in range(LAYERS)]


def test_every_family_has_a_layer_to_recompute_for_all_that_mixes_tokens() -> None:
    """And MLPs with the code of one that is tried in tiles."""
    tried = set().union(*(codes_of_mlps(featured_model(family)) for family in FAMILIES))
    for family in SUPPORTED:
        model = featured_model(family)
        assert codes_of_mlps(model) <= tried, family
        inside = [id(m) for layer in decoder_layers(model) for m in layer.modules()]
        attentions = [id(module) for module in attention_modules(model)]
        recurrent = [id(module) for module in recurrent_modules(model)]
        facts = ModelFacts.of(model.config)
        assert (len(attentions), len(recurrent)) == (len(facts.windows), facts.num_recurrent)
        assert len(decoder_layers(model)) == model.config.num_hidden_layers
        assert [found for found in inside if found in set(attentions)] == attentions, family
        assert [found for found in inside if found in set(recurrent)] == recurrent, family


def test_layers_that_stay_whole_cost_no_more_than_measured_and_least_if_last() -> None:
    with LiveBytes(PLENTY) as meter:
        it = Trained(deep_model(), meter=meter)
        it.step()
        it.step()
        use = it.handle.checkpointing.memory
        assert use is not None
        assert len(set(use.extra_bytes)) == 1
        extra, peaks = use.extra_bytes[0].none, []
        for whole in range(LAYERS + 1):
            it.force(last(whole))
            peaks.append(it.peak(meter))
            it.force(last(whole)[::-1])
            assert it.peak(meter) >= peaks[-1]
    for whole, peak in enumerate(peaks):
        assert peak <= peaks[0] + whole * extra
    assert peaks[-1] > peaks[0] + (LAYERS - 2) * extra


def capacity_beside(use: MemoryUse, layers: float) -> int:
    """A capacity with room for `layers` more whole layers than there were in `use`."""
    return int((use.peak_bytes + layers * use.extra_bytes[0].none) / (1 - MARGIN))


def test_as_many_layers_stay_whole_as_the_memory_takes() -> None:
    wanted = Trained(deep_model(), checkpoint="none").step()
    with LiveBytes(PLENTY) as meter:
        probe = Trained(deep_model(), meter=meter)
        probe.step()
        use = probe.handle.checkpointing.memory
        assert use is not None
    for more in range(LAYERS):
        with LiveBytes() as meter:
            meter.capacity_bytes = capacity_beside(use, more + 0.5)
            it = Trained(deep_model(), meter=meter)
            for _ in range(4):
                assert_equal(it.step(), wanted)
            assert it.peak(meter) <= (1 - MARGIN) * meter.capacity_bytes
        assert it.handle.checkpointing.num_whole_layers >= min(LAYERS, 1 + more)
        assert it.handle.checkpointing.policies == tuple(
            last(it.handle.checkpointing.num_whole_layers)
        )


def test_whole_rows_evaluation_and_adapters() -> None:
    def adapted(checkpoint: str, meter: LiveBytes | None = None) -> Trained:
        model = get_peft_model(deep_model(), LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
        return Trained(model, meter=meter, checkpoint=checkpoint)

    plain = adapted("none")
    with LiveBytes(PLENTY) as meter:
        it = adapted("auto", meter)
        ids = torch.arange(plain.length)[None]
        for number in range(4):
            for each in (plain, it):
                each.model.eval()
                with torch.no_grad():
                    each.loss(2 * plain.length)
                each.model.train()
            assert it.handle.checkpointing.num_whole_layers == (0, 1, LAYERS, LAYERS)[number]
            if number % 2:  # whole rows take the stock path, and count as passes
                for each in (plain, it):
                    each.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                assert_equal(gradients(it.model), gradients(plain.model))
                it.model.zero_grad(), plain.model.zero_grad()
            else:
                assert_equal(it.step(), plain.step())


def test_training_other_parameters_is_measured_anew() -> None:
    """Layers below all trained parameters keep nothing, so training those is measured anew."""
    with LiveBytes(PLENTY) as meter:
        model = deep_model()
        model.requires_grad_(False)
        model.get_decoder().layers[-1].requires_grad_(True)
        it = Trained(model, meter=meter)
        for _ in range(2):
            it.loss().backward()
            model.zero_grad()
        before = it.handle.checkpointing.memory
        model.requires_grad_(True)
        it.step()
        after = it.handle.checkpointing.memory
    assert before is not None
    assert after is not None
    assert before.extra_bytes[0].none == 0 < after.extra_bytes[0].none
    assert it.handle.checkpointing.num_whole_layers == 1


def test_an_interrupted_forward_is_forgotten() -> None:
    """A forward that raised must not count as a pass whose activations are alive."""
    with LiveBytes(PLENTY) as meter:
        it = Trained(deep_model(), meter=meter)
        it.step()
        norm = it.model.get_decoder().norm
        hook = norm.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            it.loss()
        hook.remove()
        for _ in range(2):
            it.step()
        auto = it.handle._checkpoints._auto
        assert auto is not None
        assert not auto._open
        assert auto._window.at_once == 1


def fail(*_: object) -> None:
    raise ZeroDivisionError


def check_changes_between_passes() -> None:
    """Two graphs under different policies are alive at once; backward runs in either order."""
    whole: tuple[LayerPolicy, ...] = ("none", "none")
    for order in (1, -1):
        found = {}
        for first, second in ((whole, whole), (("none", "attention"), ("full", "none"))):
            it = Trained(tiny_model(), forced=first, ulysses_degree=2)
            losses = [it.loss(seed=1)]
            it.force(second)
            losses.append(it.loss(seed=2))
            it.force(("full", "attention"))
            for loss in losses[::order]:
                loss.backward()
            found[first] = {"losses": torch.stack(losses), **gradients(it.model)}
        assert_equal(found["none", "attention"], found[whole])


def check_least_memory_of_the_group(rank: int) -> None:
    degree: dict[str, Any] = {"ulysses_degree": 2}
    wanted = Trained(deep_model(), checkpoint="none", **degree).step()
    with LiveBytes(PLENTY) as meter:
        it = Trained(deep_model(), meter=meter, **degree)
        it.step()
        use = it.handle.checkpointing.memory
        assert use is not None
        if rank == 1:
            meter.capacity_bytes = capacity_beside(use, 1.5)
        for _ in range(3):
            assert_equal(counted_step(it), wanted)
        mine = torch.tensor(it.handle.checkpointing.num_whole_layers)
    everyone = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(everyone, mine)
    assert 2 <= int(mine) < LAYERS
    assert everyone == [mine, mine]


def check_replicas_may_differ(rank: int) -> None:
    """FSDP2 gathers and reduces layer by layer, so replicas may recompute different layers."""
    wanted: Any = None
    for forced in ([last(0)] * 2, [last(LAYERS), last(0)], [last(2), last(3)]):
        it = Trained(deep_model(), forced=forced[rank])
        it.shard()
        for seed in (1, 2):  # gradients of two passes add up
            loss = it.loss(seed=seed + 2 * rank)
            loss.backward()
        grads = {name: averaged(grad) for name, grad in gradients(it.model).items()}
        found = {"loss": loss.detach(), **grads}
        wanted = wanted or found
        assert_equal(found, wanted)


def check_on_two_ranks(rank: int) -> None:
    check_changes_between_passes()
    check_least_memory_of_the_group(rank)
    check_replicas_may_differ(rank)


def test_on_two_ranks() -> None:
    run_distributed(check_on_two_ranks, 2)
