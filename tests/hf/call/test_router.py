"""The load-balancing loss of experts over shards equals that of one process over whole rows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from longctx_patch import (
    LongContextConfig,
    patch,
    run_virtual_ranks,
    virtual_group,
)
from longctx_patch.hf.call.gather import whole_router_logits
from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.sequence.layout import contiguous
from longctx_patch.transport import VirtualTransport
from tests.harness import run_distributed
from tests.hf.steps import TOLERANCE, collated
from tests.hf.tiny import (
    SUPPORTED,
    gradients,
    mean_over_ranks,
    precise_model,
    router_weight,
    token_rows,
)
from tests.memory.trained import Gradients, assert_near
from tests.reference import relative_error

EXPERTS, CHOSEN, LAYERS = 4, 2, 3
LENGTHS = (23, 11, 1)
ROUTED = [family.model_type for family in SUPPORTED.values() if "router loss" in family.features]


def loss_of(layers: tuple[Tensor, ...], mask: Tensor | None = None) -> Tensor:
    loss = load_balancing_loss_func(layers, EXPERTS, CHOSEN, mask)
    assert isinstance(loss, Tensor)
    return loss


def padding_mask(length: int) -> Tensor:
    return (torch.arange(length) < torch.tensor(LENGTHS)[:, None]).long()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [23, 30])
def test_whole_logits_in_global_order_with_the_gradient_of_one_process(
    num_ranks: int, length: int
) -> None:
    """Shards are uneven; from 5 ranks on some hold only padding of all rows but the first."""
    torch.manual_seed(0)
    layers = [torch.randn(3, length, EXPERTS, requires_grad=True) for _ in range(LAYERS)]
    mask = padding_mask(length)
    wanted = loss_of(tuple(layer.flatten(0, 1) for layer in layers), mask)
    wanted.backward()
    layout = contiguous(length, num_ranks)

    def on_one_rank(transport: VirtualTransport) -> tuple[Tensor, list[Tensor]]:
        group = virtual_group(transport, LongContextConfig(ring_degree=num_ranks))
        rank = group.group_rank
        mine = [layout.shard(layer.detach(), rank, 1).requires_grad_() for layer in layers]
        flat = [layer.flatten(0, 1) for layer in mine]
        whole = whole_router_logits(flat, group, layout, LENGTHS)
        for layer, found in zip(layers, whole, strict=True):
            assert torch.equal(found, layer[mask.bool()])
        loss = loss_of(whole)
        loss.backward()
        assert group.counters.messages == 0, "attention's plans would seem wrong"
        return loss.detach(), [layer.grad for layer in mine if layer.grad is not None]

    results = run_virtual_ranks(num_ranks, on_one_rank)
    for loss, _ in results:
        assert relative_error(loss, wanted.detach()) < TOLERANCE
    for number, layer in enumerate(layers):
        # Only the owner's gradient isn't zero, so the mean over ranks is 1 / num_ranks of it.
        shards = [grads[number] / num_ranks for _, grads in results]
        assert layer.grad is not None
        assert relative_error(layout.unshard(shards, 1), layer.grad) < TOLERANCE


def rows() -> list[dict[str, list[int]]]:
    return [
        {"input_ids": row["input_ids"][:length]}
        for row, length in zip(token_rows(max(LENGTHS), len(LENGTHS)), LENGTHS, strict=True)
    ]


def model_of(family: str, in_config: bool) -> Any:
    """The balancing loss has as much weight as the token loss."""
    weight = {router_weight(family): 1.0}
    return precise_model(family, **weight, output_router_logits=in_config)


def one_process(family: str) -> Gradients:
    model = model_of(family, in_config=False)
    length = max(LENGTHS)
    ids = torch.tensor([r["input_ids"] + [0] * (length - len(r["input_ids"])) for r in rows()])
    mask = padding_mask(length)
    out = model(
        input_ids=ids,
        attention_mask=mask,
        labels=ids.masked_fill(mask == 0, -100),
        output_router_logits=True,
        use_cache=False,
    )
    out.loss.backward()
    return {"loss": out.loss.detach(), "aux": out.aux_loss.detach(), **gradients(model)}


def check_models(rank: int, num_ranks: int) -> None:
    policies: tuple[CheckpointPolicy, ...] = ("none", "attention")
    for number, family in enumerate(ROUTED if num_ranks > 1 else ROUTED[:2]):
        config = LongContextConfig(ring_degree=num_ranks, checkpoint=policies[number // 2 % 2])
        check_model(family, config, number % 2 == 0, one_process(family))


def check_model(
    family: str,
    config: LongContextConfig,
    in_config: bool,
    wanted: Gradients,
) -> None:
    """Evaluate, train, unpatch; the config or the call (`in_config`) asks for router logits."""
    model = model_of(family, in_config)
    handle = patch(model, config)
    asked: dict[str, Any] = {} if in_config else {"output_router_logits": True}
    model.eval()
    with torch.no_grad():
        evaluated = model(**collated(handle, rows()), **asked)
    model.train()
    out = model(**collated(handle, rows()), **asked)
    out.loss.backward()
    for found in (evaluated, out):
        losses = {"loss": mean_over_ranks(found.loss.detach()), "aux": found.aux_loss.detach()}
        assert_near(losses, {name: wanted[name] for name in losses}, TOLERANCE)
    grads = {name: mean_over_ranks(grad) for name, grad in gradients(model).items()}
    assert_near(losses | grads, wanted, TOLERANCE)
    if config.ring_degree > 1 and not in_config:  # ranks that would wait for each other
        alone = {"output_router_logits": handle.group_rank == 0}
        with pytest.raises(ValueError, match="shards of the same batch"):
            model(**collated(handle, rows()), **alone)
    handle.unpatch()
    stock = model(torch.tensor([rows()[0]["input_ids"]]), output_router_logits=True)
    assert len(stock.router_logits[0]) == max(LENGTHS), "a hook is left behind"


def test_models_have_the_loss_and_gradients_of_one_process() -> None:
    run_distributed(check_models, 2, 2)


def test_padding_does_not_count_on_one_rank() -> None:
    check_models(0, 1)
