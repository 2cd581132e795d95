"""Patched models over processes equal the unpatched model in one process."""

from itertools import product
from typing import Any

import pytest
import torch

from longctx_patch import (
    LongContextConfig,
    all_configs,
    count_valid_tokens,
    pack_rows,
    patch,
    verify,
    world_place,
)
from longctx_patch.verification.shrink import keep_float64
from tests.harness import run_distributed
from tests.hf.steps import Rows, Step, collated, complaints, over_ranks
from tests.hf.tiny import (
    FAMILIES,
    featured_model,
    gradients,
    tiny_config,
    tiny_model,
    token_rows,
)

# Prime lengths; 3 is less than the number of chunks, so some ranks hold only padding.
SHAPES = [(31, "float32"), (3, "float32"), (13, "float64")]


@pytest.mark.parametrize("world_size", [3, 4])
def test_every_family_equals_one_process(world_size: int) -> None:
    """Loss, logits, gradients and traffic are right in every way to cut a sequence, over four ranks
    with one of the lengths each; that `verify` would find an error is shown in
    tests/cli/test_verify.py."""
    configs = all_configs(world_size)
    for number, (length, dtype) in enumerate(SHAPES):
        model_config = tiny_config(FAMILIES[(number + world_size) % len(FAMILIES)])
        some = configs if world_size == 3 else configs[number :: len(SHAPES)]
        report = verify(model_config, some, dtype=dtype, seq_len=length)
        assert report.ok, [case for case in report.cases if not case.ok]


@pytest.mark.parametrize("family", FAMILIES)
def test_degree_one_is_bitwise_stock(family: str) -> None:
    """Loss, logits and gradients are bitwise equal. The chunked loss, which rounds in another
    order, is tested in test_lm_head.py."""
    stock = tiny_model(family)
    ids = torch.tensor([row["input_ids"] for row in token_rows(31)])
    wanted = stock(input_ids=ids, labels=ids)
    wanted.loss.backward()
    for policy in ("none", "full", "attention"):
        model = tiny_model(family)
        handle = patch(model, LongContextConfig(checkpoint=policy, loss="logits"))
        out = model(**collated(handle, token_rows(31)))
        out.loss.backward()
        assert torch.equal(out.loss, wanted.loss)
        assert torch.equal(out.logits, wanted.logits)
        grads = gradients(model)
        assert all(torch.equal(grads[name], grad) for name, grad in gradients(stock).items())
        assert handle.counters.messages == 0


def check_loss_law(rank: int) -> Step:
    """A step of two replicas of two shards, with three micro batches and uneven labels."""
    model = tiny_model()
    config = LongContextConfig(ring_degree=2, layout="contiguous")
    handle = patch(model, config)
    place = world_place(config)
    mine = [uneven_rows(micro, place.data_parallel_rank) for micro in range(3)]
    batches = [collated(handle, rows) for rows in mine]
    num_valid_tokens = count_valid_tokens(batches)
    total = torch.zeros(())
    for batch in batches:
        loss = model(**batch, num_valid_tokens=num_valid_tokens).loss
        loss.backward()
        total += loss.detach()
    assert handle.group_rank == place.group_rank
    return over_ranks(total, model)


def uneven_rows(micro: int, replica: int) -> Rows:
    """Replica 0 has labels only in its first shard; replica 1 has none in its second batch."""
    rows = token_rows(16 + 2 * micro, num_rows=1, seed=10 * micro + replica)
    for row in rows:
        ids = row["input_ids"]
        if replica == 0:
            row["labels"] = [*ids[:4], *[-100] * (len(ids) - 4)]
        elif micro == 1:
            row["labels"] = [-100] * len(ids)
    return rows


def test_the_loss_law_over_replicas_shards_and_accumulation() -> None:
    model = tiny_model()
    sums, count = torch.zeros(()), 0
    for micro, replica in product(range(3), range(2)):
        (row,) = uneven_rows(micro, replica)
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor([row.get("labels", row["input_ids"])])[:, 1:].flatten()
        logits = model(input_ids=ids).logits[0, :-1]
        sums = sums + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        count += int((labels != -100).sum())
    (sums / count).backward()
    wanted = Step((sums / count).detach(), gradients(model))
    for found in run_distributed(check_loss_law, 4):
        assert not complaints(found, wanted, "all micro batches")


PROMPT, *GOES_ON = (
    token_rows(length, num_rows=1, seed=length)[0]["input_ids"] for length in (17, 5, 29, 2)
)
GROUP: dict[str, Any] = {"input_ids": PROMPT, "branches": [{"input_ids": ids} for ids in GOES_ON]}
GROUP["branches"][1]["labels"] = [*[-100] * 3, *GOES_ON[1][3:]]
OTHER = {"input_ids": PROMPT[:9]}
WITH_BRANCHES = ("llama", "mistral", "gpt_oss", "mixtral", "qwen3_next")


def exact_model(family: str) -> Any:
    keep_float64(model := featured_model(family))
    model.config.output_router_logits = family == "mixtral"
    return model


def check_branches(rank: int) -> list[Step]:
    steps = []
    for family in WITH_BRANCHES:
        handle = patch(model := exact_model(family), LongContextConfig(ring_degree=2))
        rows: Any = list(pack_rows([GROUP, OTHER], 64))
        (batch,) = handle.plan_ahead([collated(handle, rows)])
        loss = model(**batch).loss
        loss.backward()
        steps.append(over_ranks(loss, model))
    return steps


def test_a_prompt_and_its_branches_equal_a_row_for_each_branch() -> None:
    rows = [[*PROMPT, *ids] for ids in GOES_ON] + [OTHER["input_ids"]]
    ids, labels, real = torch.full((3, len(rows), max(map(len, rows))), -100)
    ids.fill_(0), real.zero_()
    for number, row in enumerate(rows):
        ids[number, : len(row)], real[number, : len(row)] = torch.tensor(row), 1
        start = 0 if number == 3 else len(PROMPT) + 3 * (number == 1)
        labels[number, start : len(row)] = torch.tensor(row[start:])
    found = run_distributed(check_branches, 2)
    for number, family in enumerate(WITH_BRANCHES):
        model = exact_model(family)
        loss = model(input_ids=ids, labels=labels, attention_mask=real, use_cache=False).loss
        loss.backward()
        wanted = Step(loss.detach(), gradients(model))
        for steps in found:
            assert not (wrong := complaints(steps[number], wanted, family, 1e-10)), wrong
