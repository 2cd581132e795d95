"""Losses and refusals of a patched model that can only go wrong on several ranks."""

from typing import Any

import pytest
import torch

from longctx_patch import LongContextConfig, count_valid_tokens, patch
from longctx_patch.sequence.masks import bidirectional
from tests.harness import run_distributed
from tests.hf.steps import Rows, Step, collated, complaints, over_ranks
from tests.hf.tiny import VOCABULARY, featured_model, gradients, tiny_model, token_rows
from tests.reference import relative_error

LENGTHS = (11, 24)


def batches() -> list[Rows]:
    """Two batches of one row each, of different lengths."""
    rows = token_rows(max(LENGTHS))
    pairs = zip(rows, LENGTHS, strict=True)
    return [[{"input_ids": row["input_ids"][:length]}] for row, length in pairs]


def stock_step(model: Any) -> float:
    """The mean token loss over all batches, plus router losses weighted by tokens."""
    counts = [length - 1 for length in LENGTHS]
    total = 0.0
    for (row,), count in zip(batches(), counts, strict=True):
        ids = torch.tensor([row["input_ids"]])
        out = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        share = count / sum(counts)
        loss = share * out.loss  # out.loss includes the router loss
        loss.backward()
        total += loss.item()
    return total


def check_accumulation(rank: int, num_ranks: int) -> None:
    reference: Any = featured_model("qwen3_moe", router_aux_loss_coef=1.0)
    loss_alone = stock_step(reference)
    patched: Any = featured_model("qwen3_moe", router_aux_loss_coef=0.25)
    handle = patch(patched, LongContextConfig(ring_degree=num_ranks))
    patched.router_aux_loss_coef = 1.0  # set after the patch, as a schedule does
    micro = [collated(handle, rows) for rows in batches()]
    count = count_valid_tokens(micro)
    total = torch.zeros(())
    for batch in micro:
        loss = patched(**batch, num_valid_tokens=count, output_router_logits=True).loss
        loss.backward()
        total += loss.detach()
        assert patched.router_aux_loss_coef == 1.0
    wanted = Step(torch.tensor(loss_alone), gradients(reference))
    assert not complaints(over_ranks(total, patched), wanted, "two batches")
    handle.unpatch()
    assert patched.router_aux_loss_coef == 1.0


def check_labels_of_one_rank(rank: int, num_ranks: int) -> None:
    """Only rank 0 has impossible labels: both ranks raise, and rank 0 says why."""
    model = tiny_model()
    handle = patch(model, LongContextConfig(ring_degree=num_ranks))
    batch = collated(handle, token_rows(24))

    def with_first(label: int, *names: str) -> dict[str, Any]:
        changed = {name: batch[name].clone() for name in names}
        for labels in changed.values():
            labels[0, 0] = label
        return changed

    both = ("labels", "shift_labels")
    bad: list[tuple[dict[str, Any], str]] = [
        # Somebody masked a token that only this rank holds.
        (with_first(-100, "labels"), "labels differ from shift_labels"),
        # The tokenizer of this rank has more words than the model.
        (with_first(VOCABULARY, *both), f"label {VOCABULARY}: labels are from 0"),
        ({"labels": batch["labels"].tolist()}, r"labels \[\["),
        ({name: batch[name][:, 1:] for name in both}, "each token of the shard"),
        ({"labels": None}, "a shard with labels None and shift_labels tensor"),
    ]
    for changed, problem in bad:
        with pytest.raises(ValueError, match="rank 0 of the group refused" if rank else problem):
            model(**(batch if rank else batch | changed))
    model.lm_head = torch.nn.Linear(64, VOCABULARY - 1, bias=False)  # fewer words than the config
    says = "rank 0 of the group refused" if rank else f"label {VOCABULARY - 1}: labels are"
    with pytest.raises(ValueError, match=says):
        model(**batch | with_first(0 if rank else VOCABULARY - 1, *both))


def check_passes_without_labels(rank: int, num_ranks: int) -> None:
    model = tiny_model()
    handle = patch(model, LongContextConfig(ring_degree=num_ranks))
    batch = collated(handle, token_rows(24))
    unlabelled = {name: value for name, value in batch.items() if "labels" not in name}
    with pytest.raises(
        ValueError, match=r"(?s)rank 0.*a shard with labels\n.*a shard without labels"
    ):
        model(**(unlabelled if rank == 1 else batch))
    one = collated(handle, [{"input_ids": list(range(8)), "seq_lengths": [3, 5]}])
    joined = {key: torch.cat([value, value]) for key, value in one.items()}
    del joined["position_ids"]
    with pytest.raises(ValueError, match="a batch of 2 packed rows"):
        model(**joined)
    model.eval()
    without = unlabelled | {"shift_labels": batch["shift_labels"]}
    assert torch.equal(model(**without).logits, model(**unlabelled).logits)


def check_a_mask_that_fails(rank: int, num_ranks: int) -> None:
    """A mask function is called once for each length; its error on one rank is raised on both."""
    asked: list[int] = []

    def factory(num_tokens: int) -> Any:
        asked.append(num_tokens)
        if num_tokens == 28 and rank == 1:
            raise RuntimeError("no such mask")
        return bidirectional(num_tokens)

    model = tiny_model()
    handle = patch(model, LongContextConfig(ring_degree=num_ranks), mask=factory)
    for _ in range(2):
        model(**collated(handle, token_rows(24)))
    assert asked == [24]
    other = "no such mask" if rank == 1 else "rank 1 of the group refused"
    with pytest.raises(ValueError, match=other):
        model(**collated(handle, token_rows(28)))
    model.eval()
    with pytest.raises(ValueError, match="whole rows with a model that was patched with a mask"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))


def check_evaluation_of_replicas(rank: int, num_ranks: int) -> None:
    """With `num_valid_tokens` the loss law holds; without, each replica evaluates by itself."""
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    batch = collated(handle, batches()[rank])
    count = count_valid_tokens([batch])
    wanted = model(**batch, num_valid_tokens=count).loss
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(**batch, num_valid_tokens=count).loss, wanted)
        for _ in range(1 + rank):  # replicas may have different numbers of batches
            alone = model(**batch).loss
    share = (LENGTHS[rank] - 1) / count * num_ranks
    assert relative_error(alone * share, wanted.detach()) < 1e-6


CHECKS = (
    check_accumulation,
    check_labels_of_one_rank,
    check_passes_without_labels,
    check_a_mask_that_fails,
    check_evaluation_of_replicas,
)


def check_all(rank: int, num_ranks: int) -> None:
    for check in CHECKS:
        check(rank, num_ranks)


def test_over_two_ranks() -> None:
    run_distributed(check_all, 2, 2)
