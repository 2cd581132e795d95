"""Log-probabilities of tokens of whole rows: a DPO step by hand has the losses and gradients of one
process that runs each document through the stock model."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.hf.handle import evaluation_mode
from longctx_patch.loss import token_log_probs as tiles
from tests.harness import run_distributed
from tests.hf.row_batches import BATCHES, DOCUMENTS, Batch, of_documents
from tests.hf.steps import Step, collated, complaints, on_ranks, over_ranks, reduced
from tests.hf.tiny import VOCABULARY, featured_model, gradients
from tests.loss.test_linear_cross_entropy import Work
from tests.reference import relative_error


def stock_log_probs(model: Any) -> list[Tensor]:
    """The values of each document are those of the stock model's full logits."""
    found = []
    for ids, labels in DOCUMENTS:
        logs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        wanted = labels[1:]
        chosen = logs.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        found.append(chosen * (wanted != -100))
    return found


def dpo_loss(policy: list[Tensor], reference: list[Tensor]) -> Tensor:
    gains = torch.stack([a.sum() - b.sum() for a, b in zip(policy, reference, strict=True)])
    chosen, rejected = gains.view(-1, 2).unbind(1)
    return -logsigmoid(0.3 * (chosen - rejected)).mean()


def moved(model: Any) -> Any:
    """A policy that is no longer its reference."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def two_models(family: str) -> tuple[Any, Any]:
    """Policy and reference."""
    return moved(featured_model(family)), featured_model(family).eval()


def one_adapted(**options: Any) -> tuple[Any, None]:
    adapter = LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["q_proj"]} | options)
    torch.manual_seed(2)
    return get_peft_model(featured_model("llama"), adapter).train(), None


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llama": lambda: two_models("llama"),
    "gemma2": lambda: two_models("gemma2"),
    "cohere": lambda: two_models("cohere"),
    "mixtral": lambda: two_models("mixtral"),
    "adapters": lambda: one_adapted(target_modules=["q_proj", "down_proj"]),
    "adapters on the head": lambda: one_adapted(target_modules=["v_proj", "lm_head"]),
    "head saved": lambda: one_adapted(modules_to_save=["lm_head"]),
}


@cache
def alone(name: str) -> tuple[list[Tensor], Step]:
    """Log-probabilities and step of one process."""
    policy, reference = MODELS[name]()
    with torch.no_grad():
        if reference is None:
            with policy.disable_adapter():
                before = stock_log_probs(policy)
        else:
            before = stock_log_probs(reference)
    found = stock_log_probs(policy)
    loss = dpo_loss(found, before)
    loss.backward()
    return [x.detach() for x in found], Step(loss.detach(), gradients(policy))


def shared(name: str, batch: Batch, config: LongContextConfig) -> tuple[list[Tensor], Step]:
    """The log-probabilities that each rank has, and the step of all of them."""
    whole, reference = MODELS[name]()

    def run(policy: Any, handle: PatchHandle) -> tuple[Tensor, Step]:
        with torch.no_grad():
            if reference is None:
                with policy.disable_adapter():
                    before = handle.token_log_probs(batch.given)
            else:
                other = patch(copy.deepcopy(reference), config, group=handle.group)
                before = other.token_log_probs(batch.given)
        found = handle.token_log_probs(batch.given, model=policy if reference is None else None)
        assert found.shape == (len(batch.given["labels"]), batch.given["labels"].shape[1] - 1)
        assert not found[batch.given["labels"][:, 1:] == -100].any()
        loss = dpo_loss(of_documents(found, batch), of_documents(before, batch))
        loss.backward()
        return found.detach(), Step(loss.detach(), gradients(policy))

    (found, *others), steps = zip(*on_ranks(whole, config, run), strict=True)
    assert all(torch.equal(found, other) for other in others)
    return of_documents(found, batch), reduced(list(steps))


WAYS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["llama", "adapters on the head"]),
    ({"ring_degree": 2}, list(MODELS)),
    ({"ulysses_degree": 2, "loss": "logits", "checkpoint": "attention"}, ["llama", "gemma2"]),
    ({"ring_degree": 4}, ["llama", "adapters"]),
    ({"ulysses_degree": 2, "ring_degree": 2}, ["llama"]),
]


def kinds_of(name: str) -> list[str]:
    """All batches for Llama, and one in turn for each other model."""
    kinds, number = list(BATCHES), list(MODELS).index(name)
    return kinds if name == "llama" else [kinds[number % len(kinds)]]


@pytest.mark.parametrize(("way", "names"), WAYS, ids=str)
def test_dpo_by_hand(
    way: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE_BYTES", 7 * 4 * VOCABULARY)  # several tiles
    for name in names:
        expected, step = alone(name)
        for kind in kinds_of(name):
            values, found = shared(name, BATCHES[kind], LongContextConfig(**way))
            for pair in zip(expected, values, strict=True):
                assert relative_error(*pair) < 1e-5, (name, kind)
            wrong = complaints(found, step, (name, kind))
            assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("adapted", [False, True])
def test_full_logits_never_exist(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_adapted(target_modules=["lm_head"])[0] if adapted else featured_model("llama")
    handle, ids = patch(model, LongContextConfig()), torch.arange(200)[None] % VOCABULARY
    monkeypatch.setattr(tiles, "TILE_BYTES", 20 * 4 * VOCABULARY)
    with Work(width=VOCABULARY) as work:
        handle.token_log_probs({"input_ids": ids, "labels": ids}).sum().backward()
    assert work.numel == 64 * VOCABULARY, "the transposed weight of the head"


@pytest.mark.parametrize("name", MODELS)
def test_top1_is_what_greedy_decoding_emits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are the stock model's likeliest words, but for every third one."""
    monkeypatch.setattr(tiles, "TILE_BYTES", 7 * 4 * VOCABULARY)
    model, batch = MODELS[name]()[0], BATCHES[kinds_of(name)[0]]
    labels = torch.full_like(batch.given["labels"], -100)
    with torch.no_grad():
        for (ids, _), (row, first) in zip(DOCUMENTS, batch.places, strict=True):
            top = model(input_ids=ids[None], use_cache=False).logits[0, :-1].argmax(-1)
            other = (top + (torch.arange(len(top)) % 3 == 0)) % VOCABULARY
            labels[row, first + 1 : first + len(ids)] = other
    handle = patch(model, LongContextConfig())
    handle.model.config.output_router_logits = name == "mixtral"  # which are left out
    given = batch.given | {"labels": labels}
    with evaluation_mode(model):
        found = handle.label_scores(given, model=model if "adapters" in name else None)
        alone = handle.token_log_probs(given)
    torch.testing.assert_close(found["log_probs"], alone, rtol=1e-5, atol=1e-5)
    assert found["is_top1"].dtype == torch.bool
    assert not found["is_top1"][labels[:, 1:] == -100].any()
    for hits in of_documents(found["is_top1"], batch):
        assert hits.tolist() == [place % 3 != 0 for place in range(len(hits))]


def test_hooks_on_the_head_are_heard() -> None:
    model, stock = featured_model("gemma2"), featured_model("gemma2")
    for each in (model, stock):
        each.lm_head.register_forward_hook(lambda *given: given[-1] * 0.5)
    found = patch(model, LongContextConfig()).token_log_probs(BATCHES["left"].given)
    for values in zip(of_documents(found, BATCHES["left"]), stock_log_probs(stock), strict=True):
        assert relative_error(*values) < 1e-5


def check_refusals(rank: int) -> None:
    given = BATCHES["right"].given
    model = featured_model("llama")
    handle = patch(model, LongContextConfig(ring_degree=2))
    rows = [{"input_ids": ids.tolist()} for ids, _ in DOCUMENTS]
    shard = collated(handle, rows)
    wrong: list[tuple[dict[str, Any], str]] = [
        (given | {"labels": None}, "log-probabilities of whole rows without labels"),
        (shard, "longctx_shard with whole rows: this batch is a shard already"),
        (given | {"logits_to_keep": 3}, "logits_to_keep with labels of whole rows"),
        (given | {"labels": given["labels"].clamp(min=-1)}, "labels on padding"),
    ]
    for batch, says in wrong:  # on one rank alone: the other learns of it
        with pytest.raises(ValueError, match=says if rank else "rank 1 of the group refused"):
            handle.token_log_probs(batch if rank else given)
    with pytest.raises(ValueError, match=r"with labels for loss\n.*with labels for log_probs"):
        handle.token_log_probs(given) if rank else model(**given)
    model.eval()
    with pytest.raises(ValueError, match="gradients in evaluation mode"):
        handle.token_log_probs(given)
    with torch.no_grad(), pytest.raises(ValueError, match=r"(?s)a shard with labels\n.*log_probs"):
        handle.token_log_probs(given) if rank else model(**shard)


def check_ddp(rank: int) -> None:
    """Two replicas; a call past DDP is refused."""
    batches = (BATCHES["right"].given, BATCHES["packed"].given)
    stock, model = featured_model("llama"), featured_model("llama")
    for batch in batches:
        handle = patch(stock, LongContextConfig())
        (handle.token_log_probs(batch).square().sum() / 2).backward()
        handle.unpatch()
    for finds_unused in (False, True):
        handle = patch(model, LongContextConfig())
        replicas: nn.Module = DistributedDataParallel(model, find_unused_parameters=finds_unused)
        with pytest.raises(ValueError, match=r"DDP would not .*\(batch, model=ddp_model\)"):
            handle.token_log_probs(batches[rank])
        handle.token_log_probs(batches[rank], model=replicas).square().sum().backward()
        wanted = gradients(stock)
        for name, grad in gradients(model).items():
            assert relative_error(grad, wanted[name]) < 1e-5, name
        model.zero_grad()
        handle.unpatch()


def check_fsdp(rank: int) -> None:
    """The head's weight is whole while it runs, and again in backward; also beside adapters."""
    tiles.TILE_BYTES = 7 * 4 * VOCABULARY
    given = BATCHES["left"].given
    for splits_head, adapted in ((True, False), (False, False), (True, True)):
        wanted: dict[str, Tensor] = {}
        for shards in (False, True):
            model = (
                one_adapted(target_modules=["lm_head"])[0] if adapted else featured_model("llama")
            )
            handle = patch(model, LongContextConfig(ring_degree=2))
            base = handle.model
            if shards:
                for layer in base.model.layers:
                    fully_shard(layer)
                if splits_head:
                    fully_shard(base.lm_head)
                fully_shard(model)
            wrapper = model if adapted else None
            with torch.no_grad():
                handle.token_log_probs(given, model=wrapper)
            loss = handle.token_log_probs(given, model=wrapper).square().sum()
            loss.backward()
            if not shards:
                step = over_ranks(loss, model)
                wanted = step.grads
            else:
                assert relative_error(loss.detach(), step.loss) < 1e-6
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        assert relative_error(parameter.grad.full_tensor(), wanted[name]) < 1e-5


def check_all(rank: int) -> None:
    check_refusals(rank)
    check_ddp(rank)
    check_fsdp(rank)


def test_on_two_processes() -> None:
    run_distributed(check_all, 2)
