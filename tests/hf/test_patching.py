"""Patching binds one model, refuses what it can't do before any change, and can be undone."""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from longctx_patch import (
    LongContextConfig,
    PatchHandle,
    SequenceShardCollator,
    UnsupportedModelError,
    attention,
    patch,
)
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.facts import ModelFacts
from longctx_patch.hf import patching
from longctx_patch.kernels.backends.torch_cpu import TorchCpuKernel
from longctx_patch.sequence.masks import bidirectional
from tests.harness import run_distributed
from tests.hf.steps import collated
from tests.hf.tiny import (
    FAMILIES,
    SUPPORTED,
    featured_model,
    tiny_config,
    tiny_model,
    token_rows,
)

ALONE = LongContextConfig()


def state_of(model: Any) -> tuple[Any, ...]:
    decoder = model.get_decoder()
    return (
        model.config._attn_implementation,
        len(decoder._forward_pre_hooks),
        model.config.to_dict(),
        {name: {*vars(module)} for name, module in model.named_modules()},
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(n for n in ("llama4_text", "falcon_h1", "deepseek_v3") if n in SUPPORTED)],
)
def test_unpatch_restores_the_model(family: str, implementation: str) -> None:
    """Each kind of layer is as it was."""
    model: Any = featured_model(family)
    model.set_attn_implementation(implementation)
    ids = torch.tensor([[1, 2, 3]])
    before, wanted = state_of(model), model(ids).logits
    handle = patch(model, ALONE)
    assert state_of(model) != before
    with pytest.raises(ValueError, match=r"patched already: call unpatch\(\)"):
        patch(model, ALONE)
    handle.unpatch()
    assert state_of(model) == before
    assert torch.equal(model(ids).logits, wanted)
    with pytest.raises(ValueError, match="unpatched already"):
        handle.unpatch()
    patch(model, ALONE).unpatch()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_generate_is_the_stock_path(implementation: str) -> None:
    """This includes left padding, whose mask transformers would drop without our function."""
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

    def generate(model: Any) -> Tensor:
        model.eval()
        return model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
        )

    model = tiny_model(attn_implementation=implementation)
    wanted = generate(model)
    patch(model, ALONE)
    assert torch.equal(generate(model), wanted)


def test_a_config_saved_from_a_patched_model_has_no_trace(tmp_path: Any) -> None:
    model = tiny_model()
    patch(model, ALONE)
    model.save_pretrained(tmp_path)
    assert "longctx" not in (tmp_path / "config.json").read_text()


def test_all_reasons_are_given_at_once() -> None:
    config = tiny_config("mistral", is_causal=False, attention_dropout=0.5)
    says = r"(?s)is_causal=False.*attention_dropout=0.5.*ulysses_degree=8 exceeds its 4 query heads"
    with pytest.raises(UnsupportedModelError, match=says):
        check_model_config(config, LongContextConfig(ulysses_degree=8))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_follows_the_local_length_is_refused(rope_type: str) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=f"rope_type '{rope_type}': .*different angles"):
        check_model_config(config, LongContextConfig(ring_degree=2))
    check_model_config(config, ALONE)


def with_loss() -> Any:
    model = tiny_model()
    model.loss_function = torch.nn.functional.cross_entropy
    return model


def with_dropout_in_its_modules() -> Any:
    model = tiny_model(attention_dropout=0.1)
    model.config.attention_dropout = 0.0  # too late: the modules have copied 0.1
    return model


def classifier() -> Any:
    """Its head would pool each rank's own last token."""
    return AutoModelForSequenceClassification.from_config(tiny_config("llama"))


REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (partial(tiny_model, "mistral", attention_dropout=0.5), {}, r"attention_dropout=0\.5"),
    (
        tiny_model,
        {"ring_degree": 2},
        r"but 1 process runs: .*2 .*notebook_launcher\(train",
    ),
    (tiny_model, {"kernel": "magic"}, "kernel='magic': choose auto or"),
    (with_loss, {}, "loss_function of its own"),
    (with_dropout_in_its_modules, {}, r"attention_dropout=0\.1"),
    (classifier, {}, "is not a causal language model"),
    (lambda: tiny_model().model, {}, "is not a causal language model"),
    (partial(torch.nn.Linear, 2, 2), {}, "Linear is not a transformers model"),
]


@pytest.mark.parametrize(("make", "config", "says"), REFUSED)
def test_a_refused_model_is_unchanged(
    make: Callable[[], Any], config: dict[str, Any], says: str
) -> None:
    model = make()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=says):
        patch(model, LongContextConfig(**config))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_a_mask_is_given_as_a_function_of_the_length() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=r"mask is a Mask: give a function .* mask=bidirectional"):
        patch(model, ALONE, mask=bidirectional(16))  # type: ignore[arg-type]
    patch(model, ALONE, mask=bidirectional).unpatch()


def test_models_that_share_a_config_object() -> None:
    first = tiny_model()
    second = type(first)(first.config)
    handle = patch(first, ALONE)
    with pytest.raises(ValueError, match=r"shares its config object .*copy\.deepcopy"):
        patch(second, ALONE)
    with pytest.raises(RuntimeError, match=r"copy\.deepcopy"):
        second(input_ids=torch.tensor([[1, 2]]))
    handle.unpatch()
    second(input_ids=torch.tensor([[1, 2]]))


def test_a_failure_while_binding_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    before = state_of(model)
    monkeypatch.setattr(patching, "ShardLoss", lambda model, group: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patch(model, ALONE)
    assert state_of(model) == before


def of_two_ranks() -> tuple[Any, PatchHandle, dict[str, Tensor]]:
    """A patched model on a ring of two, and a batch that it takes."""
    model = tiny_model()
    handle = patch(model, LongContextConfig(ring_degree=2))
    return model, handle, collated(handle, token_rows(16))


def check_refused_on_every_rank(rank: int) -> None:
    """Wrong batches are refused on every rank, before anything is sent."""
    model, handle, good = of_two_ranks()
    short = {"input_ids": good["input_ids"][:, : 1 - rank]}
    short["longctx_shard"] = torch.tensor([[rank, 1, 2, 0, 1, 0, 0]] * 2)
    ids = torch.tensor([row["input_ids"] for row in token_rows(16)])
    whole = {"input_ids": ids, "labels": ids}
    counted = whole | {"position_ids": torch.arange(16)[None]}
    bad: list[tuple[dict[str, Any], str]] = [
        (collated(handle, token_rows(16, seed=rank)), "must hold shards of the same batch"),
        (collated(handle, token_rows(16 + 4 * rank)), r"rank 1: 10 of 20 tokens"),
        ({key: value[rank : rank + 1] for key, value in good.items()}, "shards of the same batch"),
        (good | {"num_valid_tokens": 5 + rank}, "shards of the same batch"),
        (short, "leaves a rank without tokens"),
        ({"input_ids": good["input_ids"]}, "whole rows without labels in training"),
        (whole | {"labels": whole["labels"] * (1 - rank)}, "must hold shards of the same batch"),
        (whole | {"num_items_in_batch": 5 + rank}, "shards of the same batch"),
        (whole | {"num_valid_tokens": 5}, "num_valid_tokens with whole rows"),
        (counted | {"seq_lengths": 5 if rank else [[16]] * 2}, "this rank was given can't be read"),
        ({k: v for k, v in good.items() if k != "longctx_shard"}, "whose longctx_shard is missing"),
        (good | {"num_items_in_batch": 30}, "Trainer counts and scales it"),
        (good | {"output_attentions": True}, "output_attentions=True with a sharded"),
        (good | {"is_causal": False}, "is_causal=False"),
        (
            {k: v for k, v in good.items() if k != "shift_labels"},
            "shift_labels None: both are tensors",
        ),
        (good | {"labels": good["labels"] * 0}, "labels differ from shift_labels"),
    ]
    wrong_counts = (True, -1, 2.0, "30", torch.tensor([1, 2]), float("nan"))
    bad += [(good | {"num_valid_tokens": wrong}, "num_valid_tokens=") for wrong in wrong_counts]
    for batch, message in bad:
        handle.counters.reset()
        with pytest.raises(ValueError, match=message):
            model(**batch)
        assert handle.counters.messages == 0
    model(**good).loss.backward()  # still works


def check_shards_of_another_place(rank: int) -> None:
    """A shard that was cut for another rank, or in another layout, had a wrong loss without an
    error where positions can't tell: where all documents of a row are equally long, or where
    `position_ids` are left out."""
    model, handle, good = of_two_ranks()
    equally_long: list[dict[str, Any]] = [token_rows(16)[0] | {"seq_lengths": [4] * 4}]
    for rows in (equally_long, token_rows(16)):
        for config, place, message in (
            (handle.config, 0, "cut for rank 0 of .* patched here as rank 1"),
            (LongContextConfig(ring_degree=2, layout="striped"), rank, "layout 'striped', and"),
            (LongContextConfig(ulysses_degree=2), rank, "cut for .*ulysses_degree=2 x ring"),
        ):
            batch = SequenceShardCollator(config, group_rank=place, pad_token_id=0)(rows)
            del batch["position_ids"]
            with pytest.raises(ValueError, match=message):
                model(**batch)
    with pytest.raises(ValueError, match=r"describes no shard"):
        model(**good | {"longctx_shard": good["longctx_shard"][:, 4 * rank :]})
    other_name = LongContextConfig(ring_degree=2, layout=("balanced", "zigzag")[rank])
    collate = SequenceShardCollator(other_name, group_rank=rank, pad_token_id=0)
    model(**collate(token_rows(16))).loss.backward()  # the same tokens under another name


def check_ranks_that_differ(rank: int) -> None:
    """What only one rank does wrong, or does differently, is an error on both."""
    model, _, good = of_two_ranks()
    for key, value, message in (
        ("attention_mask", torch.zeros(2, 8), "other masks go to patch"),
        ("cu_seq_lens_q", torch.tensor([0, 8]), "silently drop it"),
    ):
        one_sided = good | ({key: value} if rank == 1 else {})
        with pytest.raises(
            ValueError, match=message if rank else f"rank 1 of the group refused: .*{message}"
        ):
            model(**one_sided)
    same_batch = pytest.raises(ValueError, match="shards of the same batch")
    with same_batch, torch.set_grad_enabled(not rank):
        model(**good)
    model.eval()
    with torch.no_grad(), pytest.raises(ValueError, match="longctx_shard is missing"):
        model(input_ids=good["input_ids"], position_ids=good["position_ids"])
    model.train(rank == 0)
    with pytest.raises(ValueError, match=r"gradients in evaluation mode: .*Call model\.train"):
        model(**good)
    with torch.no_grad(), pytest.raises(ValueError, match=r"(?s)rank 0.* training,.* evaluating,"):
        model(**good)
    model.train()
    model(**good).loss.backward()  # still works


def check_configs_that_differ(rank: int) -> None:
    config = LongContextConfig(ring_degree=2, layout="zigzag" if rank else "contiguous")
    with pytest.raises(ValueError, match=r"(?s)differ.*rank 0: .*contiguous.*rank 1: .*zigzag"):
        patch(tiny_model(), config)


def check_two_models(rank: int) -> None:
    """Two models of one process are patched differently, and unpatching one leaves the other."""
    first, second = tiny_model(), tiny_model("qwen2")
    ring = patch(first, LongContextConfig(ring_degree=2))
    ulysses = patch(second, LongContextConfig(ulysses_degree=2))
    for model, handle in ((first, ring), (second, ulysses)):
        model(**collated(handle, token_rows(16))).loss.backward()
    # In each of two layers, a ring of two sends 1 message forward and 2 backward. Ulysses makes an
    # all-to-all before and after attention, forward and backward.
    assert (ring.counters.messages, ulysses.counters.messages) == (6, 8)
    ring.unpatch()
    ids = torch.tensor([token_rows(16)[0]["input_ids"]])
    first(input_ids=ids, labels=ids).loss.backward()
    assert (ring.counters.messages, ulysses.counters.messages) == (6, 8)


def check_one_meeting(rank: int) -> None:
    """All that ranks compare of a forward they compare at once, since each meeting waits for the
    slowest of them, and make no facts of the config for it; what one rank can't even read ends no
    rank alone."""
    model, handle, shard = of_two_ranks()
    ids = torch.tensor([row["input_ids"] for row in token_rows(16)])
    rows = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    packed = {"input_ids": ids, "labels": ids.clone()}
    packed["labels"][:, 7] = -100
    packed["position_ids"] = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1)
    unlabelled = {key: value for key, value in shard.items() if "labels" not in key}
    model(**rows).loss.backward()  # the first step has more: before each layer
    with pytest.MonkeyPatch.context() as patched:
        meet = Mock(side_effect=handle.group.everyone.all_gather_numbers)
        patched.setattr(handle.group.everyone, "all_gather_numbers", meet)
        patched.setattr(ModelFacts, "of", None)
        for batch in (rows, packed, rows | {"num_items_in_batch": 60}, shard, unlabelled):
            model(**batch)
        assert meet.call_count == 5
        model.eval()
        with torch.no_grad(), handle.sharing_evaluation():
            model(**rows)
            handle.token_log_probs(rows)
            model(**shard)
        assert meet.call_count == 8
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="this rank was given can't be read: AttributeErr"),
    ):
        model(**shard | ({"longctx_shard": "a shard"} if rank else {}))


def check_the_way_to_the_kernel(rank: int) -> None:
    """Few functions of ours stand between a caller's queries and the first kernel, and none that
    chooses."""
    model, handle, shard = of_two_ranks()
    ways: list[list[str]] = []
    forward = TorchCpuKernel.forward

    def kernel(self: Any, *args: Any, **options: Any) -> Any:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
        ours = [file.split("/longctx_patch/")[1] for file in files if "/longctx_patch/" in file]
        ways.append([file for file in ours if file != "transport/processes.py"])
        return forward(self, *args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TorchCpuKernel, "forward", kernel)
        model(**shard)
        attention(*torch.randn(3, 1, 8, 4, 8), group=handle.group)
    for way in (ways[0], ways[-1]):
        assert len(way) <= 20, way
        assert not any(file.startswith(("planner/", "plans/")) for file in way)


CHECKS = (
    check_one_meeting,
    check_the_way_to_the_kernel,
    check_refused_on_every_rank,
    check_shards_of_another_place,
    check_ranks_that_differ,
    check_configs_that_differ,
    check_two_models,
)


def check_all(rank: int) -> None:
    for check in CHECKS:
        check(rank)


def test_over_two_ranks() -> None:
    run_distributed(check_all, 2)
