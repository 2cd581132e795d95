"""`evaluate_context`: equal to the stock model's logits over processes, replicas and FSDP2; its
results as JSON and tables; and what is refused, on all ranks."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from longctx_patch import (
    ContextEvaluation,
    ContextScores,
    LongContextConfig,
    compare_scores,
    evaluate_context,
    patch,
)
from longctx_patch.evaluation.row_scorer import RowScorer
from longctx_patch.evaluation.scores import Cell, TaskScores, in_k
from longctx_patch.evaluation.scoring import score_samples
from longctx_patch.evaluation.tasks import Sources, read_questions
from longctx_patch.recipes.models import byte_tokenizer
from tests.evaluation.stock import document, stock_log_probs
from tests.evaluation.test_scoring import MODEL, SAMPLES, expected
from tests.harness import run_distributed
from tests.hf.tiny import featured_model

LENGTH, EDGES = 61, (0, 16, 61)
TEXTS = [document(n, n) for n in (70, 61, 61, 40)]
ASKED = ContextEvaluation(lengths=(LENGTH,), texts=tuple(map(tuple, TEXTS)), edges=EDGES)


def stock_losses(model: Any) -> list[float]:
    """Over the three texts that are long enough."""
    logs = torch.stack([stock_log_probs(model, text[:LENGTH]) for text in TEXTS[:3]])
    return [-float(logs[:, :15].mean()), -float(logs[:, 15:].mean())]


def losses_of(scores: ContextScores) -> list[float | None]:
    assert scores.loss_by_position is not None
    assert scores.loss_by_position.tokens == (45, 135)
    return list(scores.loss_by_position.loss)


def over_processes(rank: int) -> list[Any]:
    """Two groups of two ranks: copies under DDP, sharded weights, and in the middle of training."""
    found: list[Any] = []
    for shards in (False, True):
        model = featured_model("llama")
        handle = patch(model, LongContextConfig(ring_degree=2))
        trained: Any = model if shards else DistributedDataParallel(model)
        if shards:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        found.append(score_samples(RowScorer(handle, trained), SAMPLES))
        scores = evaluate_context(handle, None, ASKED, model=trained)
        found.append(replace(scores, seconds=0.0).as_json())
        assert scores.seconds > 0
        assert all(module.training for module in trained.modules())
        if shards:
            assert all(isinstance(p, DTensor) for p in model.parameters())
        row = torch.tensor([document(20, 3)])
        loss = trained(input_ids=row, labels=row).loss
        loss.backward()
        assert loss.item() == pytest.approx(stock_loss(row), rel=1e-5)
    differs = replace(ASKED, seed=43) if rank == 1 else ASKED
    with pytest.raises(ValueError, match=r"disagree about what to evaluate:\n  seed: 42 on ranks"):
        evaluate_context(handle, None, differs)
    differs = replace(ASKED, sources=Sources(text=f"text of rank {rank}"))
    with pytest.raises(ValueError, match=r"disagree about what to evaluate:\n  texts and samples"):
        evaluate_context(handle, None, differs)
    beyond = ContextEvaluation(lengths=(4096,), texts=(tuple(document(4096, 1)),))
    with pytest.raises(ValueError, match="4096 tokens, but the model reaches 2048"):
        evaluate_context(handle, None, beyond)
    if rank == 3:
        handle._undo.clear()
    with pytest.raises(ValueError, match="is not patched any more"):
        evaluate_context(handle, None, ASKED)
    return found


def stock_loss(row: torch.Tensor) -> float:
    logits = featured_model("llama")(input_ids=row).logits
    return float(cross_entropy(logits[0, :-1], row[0, 1:]))


def test_over_processes() -> None:
    by_rank = run_distributed(over_processes, 4)
    assert by_rank == [by_rank[0]] * 4
    scores = [expected(sample) for sample in SAMPLES]
    for samples, evaluated in (by_rank[0][:2], by_rank[0][2:]):
        assert samples == scores
        found = ContextScores.from_json(evaluated)
        assert losses_of(found) == pytest.approx(stock_losses(MODEL), rel=1e-5)
        assert found.tokens == 3 * LENGTH


def test_base_beside_tuned(tmp_path: Path) -> None:
    """Adapters count as they are switched; the table has both, the files what was found."""
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(featured_model("llama"), adapter)
    handle = patch(model, LongContextConfig())
    said: list[str] = []
    tuned = evaluate_context(handle, None, replace(ASKED, label="tuned"), model=model)
    with model.disable_adapter():
        base = evaluate_context(handle, None, replace(ASKED, label="base"), say=said.append)
    assert said == ["losses by position of 3 texts of 61 tokens"]
    assert losses_of(base) == pytest.approx(stock_losses(MODEL), rel=1e-5)
    assert losses_of(tuned) != pytest.approx(losses_of(base), rel=1e-2)
    lines = compare_scores([base, tuned]).splitlines()
    assert lines[0].split() == ["loss", "by", "position", "texts", "0-16", "16-61"]
    shown = lines[1].split()
    assert shown[:2] + shown[2::2] == ["base", "3", *(f"{loss:.4f}" for loss in losses_of(base))]
    assert lines[2].startswith("tuned")
    file = tmp_path / "scores.json"
    file.write_text(json.dumps(base.as_json(), allow_nan=False))
    assert ContextScores.read(file) == base


def test_a_task_that_no_model_can_do_is_said_to_show_nothing() -> None:
    def found(*by_length: float) -> ContextScores:
        cells = [
            Cell(length=length, depth=0.5, score=score, samples=1)
            for length, score in zip((4096, 8192), by_length, strict=True)
        ]
        tasks = {"passkey": TaskScores(scoring="forced", cells=tuple(cells), note="")}
        return ContextScores(
            label="",
            lengths=(4096, 8192),
            loss_by_position=None,
            longppl=None,
            tasks=tasks,
            seed=0,
            tokens=1,
            seconds=1.0,
        )

    assert "passkey: 0 at 4K tokens too" in compare_scores([found(0, 0), found(0, 0)])
    assert "tokens too" not in compare_scores([found(0, 0), found(1, 0)])


def test_tasks_by_length_and_depth(tmp_path: Path) -> None:
    handle = patch(
        featured_model("llama", vocab_size=384, max_position_embeddings=512), LongContextConfig()
    )
    questions = tmp_path / "questions.jsonl"
    record = {
        "context": "It rains.",
        "question": "Does it rain?",
        "answers": ["yes", "yes, it does"],
    }
    lines = [record, record | {"wrong": ["no"]}]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ContextEvaluation(
        lengths=(320, 512),
        tasks=("passkey",),
        own=tuple(read_questions(questions, byte_tokenizer(), 512)),
        depths=(0.25, 1.0),
        samples=2,
        label="random",
    )
    scores = evaluate_context(handle, byte_tokenizer(), asked, say=lambda _: None)
    task = scores.tasks["passkey"]
    assert task.note == "haystack: noise"
    cells = [(cell.length, cell.depth, cell.samples) for cell in task.cells]
    assert cells == [(320, 0.25, 2), (320, 1.0, 2), (512, 0.25, 2), (512, 1.0, 2)]
    for way in ("forced", "ranked"):
        own = scores.tasks[f"questions_{way}"]
        assert own.scoring == way
        assert re.fullmatch(r"of \d\d tokens at most", own.note)
        assert [(cell.length, cell.depth, cell.samples) for cell in own.cells] == [(512, None, 1)]
    assert 4 * (320 + 512) < scores.tokens < 4 * (320 + 512) + 5 * 64
    assert ContextScores.from_json(json.loads(json.dumps(scores.as_json()))) == scores
    table = [line.split() for line in str(scores).splitlines() if line]
    assert table[:2] == [["passkey,", "%", "random"], ["2", "samples", "each", "320", "512"]]
    assert ["25", "%", "0", "0"] in table
    assert ["mean", "0", "0"] in table


ids = tuple(document(30, 1))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lengths": ()}, r"lengths=\(\): give one or more"),
        ({"lengths": (1,)}, r"lengths=\(1,\)"),
        ({"texts": ()}, "nothing to evaluate: .*--text FILE.*--tasks .*--questions FILE"),
        ({"edges": (0, 9, 9)}, r"edges=\(0, 9, 9\)"),
        ({"lengths": (31,)}, "no text has 31 tokens: the longest of 1 has 30"),
        ({"longppl": True}, "after 4,096 tokens. Give texts and a length above 4,096"),
        ({"texts": ((97, *ids),)}, "embedding has 97 rows. Check the tokenizer"),
        ({"tasks": ("needle",)}, "needle"),
        ({"own": (replace(SAMPLES[0], prompt=(3,) * 2048, length=4096),)}, "2054 tokens"),
        ({"texts": ("a text",)}, "tokenizer=None"),
        ({"texts": (5,)}, "can't be prepared: TypeError"),
    ],
)
def test_what_is_asked_wrongly(changed: dict[str, Any], says: str) -> None:
    handle = patch(featured_model("llama"), LongContextConfig())
    asked = ContextEvaluation(**{"lengths": (30,), "texts": (ids,)} | changed)
    with pytest.raises(ValueError, match=says):
        evaluate_context(handle, None if "tokenizer" in says else byte_tokenizer(), asked)


def test_json_of_another_version(tmp_path: Path) -> None:
    wrong: list[Any] = [{"format": 0}, [], {"format": 1, "label": "x"}]
    for found in wrong:
        file = tmp_path / "scores.json"
        file.write_text(json.dumps(found))
        with pytest.raises(ValueError, match=r"scores.json: (these are no|scores with a part)"):
            ContextScores.read(file)
    assert [in_k(n) for n in (0, 999, 8192, 3 * 2**20)] == ["0", "999", "8K", "3M"]
