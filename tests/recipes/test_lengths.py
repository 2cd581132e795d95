"""Stages of rows that grow: what each step has, and what can't be."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, get_scheduler, set_seed

from longctx_patch.recipes import finetune, rehearsal, run_batches
from longctx_patch.recipes.lengths import LengthStage, read_stages
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.models import byte_tokenizer
from longctx_patch.recipes.settings import parse_settings
from tests.recipes.conftest import flags_of, settings_of
from tests.tiny_llama import TINY_LLAMA

STAGES = "16:3,64:2,32:2"


def test_stages_decide_the_row_length_and_the_number_of_steps() -> None:
    assert read_stages("16K:200, 64K:100") == (
        LengthStage(16384, 0, 200),
        LengthStage(65536, 200, 100),
    )
    settings = settings_of(
        seq_len=0, stages="16K:200,48K:50,64K:100", gradient_accumulation_steps=2
    )
    assert settings.stages == "16384:200,49152:50,65536:100"
    assert (settings.seq_len, settings.max_steps) == (65536, 350)
    each = settings.of_stages()
    assert [stage.seq_len for stage in each] == [16384, 49152, 65536]
    # Steps have as many tokens as those of the longest rows, or nearly.
    assert [stage.gradient_accumulation_steps for stage in each] == [8, 3, 2]
    assert dataclasses.replace(settings, seed=1).stages == settings.stages
    alone = settings_of(max_steps=7)
    assert alone.length_stages == (LengthStage(64, 0, 7),)
    assert settings_of().max_steps == 100


def test_steps_and_epochs_are_not_both_given() -> None:
    words = flags_of(model="m", text="t", output="o", seq_len=64)
    with pytest.raises(ValueError, match="--max-steps 9 with --num-train-epochs 2: each says"):
        parse_settings([*words, "--max-steps", "9", "--num-train-epochs", "2"])


def test_stages_as_a_flag_replace_the_steps_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "finetune.yaml"
    file.write_text("model: m\ntext: [t]\noutput: o\nseq_len: 64\nmax_steps: 100\n")
    words = ["--settings", str(file), "--stages", "32:3,64:2"]
    assert parse_settings(words).max_steps == 5
    with pytest.raises(ValueError, match=r"max_steps=100 with stages.*Give 5 or leave it out"):
        parse_settings([*words, "--max-steps", "100"])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"stages": "16K"}, "'16K' is none.*16K:200,64K:100"),
        ({"stages": "16K:200,64X:9"}, "'64X:9' is none.*write tokens as"),
        ({"stages": "16K:0"}, "a stage has 1 step or more"),
        ({"stages": "16K:1.5"}, "'16K:1.5' is none"),
        ({"stages": "1:5"}, "give a whole number of tokens, 2 to"),
        (
            {"stages": "64:5", "seq_len": 32},
            "seq_len=32 with stages.*longest rows have 64.*Give 64",
        ),
        ({"stages": "64:5", "max_steps": 9}, "max_steps=9 with stages.*there are 5 steps. Give 5"),
        ({"stages": "64:5", "max_steps": 100}, "max_steps=100 with stages"),
        (
            {"stages": "16:5,64:5", "shifted_group": 32},
            "stages='16:5,64:5': shifted_group=32 with seq_len=16: a group holds a whole row",
        ),
        ({"stages": "64:5", "num_train_epochs": 1.0}, "num_train_epochs=1.0 with.*Leave it out"),
        ({"stages": "64:5", "warmup_steps": 9}, "warmup_steps=9 with max_steps=5"),
        ({"stages": "16:5,64:5", "mixture": "long=0.5,short=0.5,from=32"}, "a row holds 16"),
    ],
)
def test_stages_that_cant_be(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings_of(**{"seq_len": 0, **given})


@pytest.fixture
def job(config_file: Path, text_file: Path, tmp_path: Path) -> list[str]:
    flags = flags_of(model=config_file, text=text_file, output=tmp_path / "out")
    return [*flags, "--full", *flags_of(stages=STAGES, learning_rate=1e-2)]


def test_losses_and_rates_are_those_of_a_plain_loop(job: list[str], tmp_path: Path) -> None:
    """Over the same rows, whose steps have 64 tokens each, with one schedule over all stages."""
    finetune.main(job)
    lines = read_metrics(tmp_path / "out")
    assert [line["seq_len"] for line in lines] == [16, 16, 16, 64, 64, 32, 32]
    assert [line["tokens"] for line in lines] == [60, 60, 60, 63, 63, 62, 62]
    settings = parse_settings(job)
    set_seed(settings.seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY_LLAMA), attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = get_scheduler("cosine", optimizer, 0, 7)
    data = run_batches.build_data(settings, byte_tokenizer())
    for step, line in enumerate(lines):
        stage = data.at(step)
        batches = stage.order.micro_batches(step - stage.of.first, 0)
        ids = torch.tensor([row["input_ids"] for batch in batches for row in batch])
        loss = model(input_ids=ids, labels=ids).loss
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["learning_rate"] == scheduler.get_last_lr()[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def test_each_stage_has_rows_of_its_own_and_the_longest_is_rehearsed(
    job: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = run_batches.build_data(parse_settings([*job, "--pack"]), byte_tokenizer())
    shapes = [b["input_ids"].shape[1] for b in run_batches.micro_batches(data, range(7))]
    assert shapes == [16] * 12 + [64] * 2 + [32] * 4
    assert [stage.of.seq_len for stage in map(data.longest, (0, 4, 5))] == [64, 64, 32]
    said = data.summary.splitlines()
    assert said[::2] == [
        "steps 1 to 3: rows of 16 tokens, 64 tokens a step (gradient_accumulation_steps=4)",
        "steps 4 to 5: rows of 64 tokens, 64 tokens a step (gradient_accumulation_steps=1)",
        "steps 6 to 7: rows of 32 tokens, 64 tokens a step (gradient_accumulation_steps=2)",
    ]
    assert len({*data.identity()["rows"]}) == 3
    assert data.named_rows[1][0] == "train data, steps 4 to 5: rows of 64 tokens"
    seen = list[int]()

    def found(_handle: Any, loss: Any, *_: Any, num_forwards: int, **__: Any) -> None:
        seen.extend((loss().item(), num_forwards))

    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return type("Out", (), {"loss": torch.tensor(input_ids.shape[1])})

    monkeypatch.setattr(rehearsal, "preflight", found)
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(global_step=1),
        model_wrapped=Model(),
        optimizer=SimpleNamespace(state={}),
        accelerator=SimpleNamespace(device="cpu", backward=0),
        long_context_handle=None,
        _gradients_stay_local=nullcontext,
    )
    rehearsal.check_memory(trainer, data)
    assert seen == [64, 1]
