"""Runs over TRL rehearse a step with their longest rows, and explain where memory ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from torch import Tensor

from longctx_patch.recipes import dpo, memory_report, rehearsal, sft, trl_memory
from longctx_patch.recipes.data.token_table import longest_row_first
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.rehearsal import MemoryCallback
from tests.memory.live_bytes import LiveBytes
from tests.recipes.conftest import write_records
from tests.recipes.trl_jobs import save_config
from tests.trl.cases import rows

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing`:FutureWarning")
LENGTHS = [5, 9, 40, 7, 11, 38, 6, 8]


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a recipe in this process, over a model with one layer more than is rehearsed."""
    save_config(tmp_path / "model", num_hidden_layers=4)
    ids = [{"input_ids": [n % 16 for n in range(length)]} for length in LENGTHS]
    for name, records in (("ids", ids), ("pairs", rows("pairs", 4, 3))):
        write_records(tmp_path / f"{name}.jsonl", records)

    def arguments(data: str, output: str, **more: Any) -> list[str]:
        values = {
            **{"model": str(tmp_path / "model" / "config.json"), "seq_len": 64, "max_steps": 2},
            **{"data": [str(tmp_path / f"{data}.jsonl")], "output_dir": str(tmp_path / output)},
            **{"use_cpu": True, "bf16": False, "report_to": "none", "logging_steps": 1},
            **{"learning_rate": 0.1, "lr_scheduler_type": "constant", "save_strategy": "no"},
            **{"optim": "sgd", "per_device_train_batch_size": 2, "disable_tqdm": True},
            **more,
        }
        file = tmp_path / f"{output}.yaml"
        file.write_text(yaml.safe_dump(values))
        return ["--config", str(file)]

    return arguments


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any], Any]]:
    """(what was found, preflight's options, tokens of the rows) of each rehearsal, with a meter of
    the CPU's tensors."""
    found: list[Any] = []
    rehearse, seen = rehearsal.preflight, list[Any]()

    def metered(handle: Any, loss: Callable[[], Tensor], *given: Any, **options: Any) -> Any:
        def noted() -> Tensor:
            hook = handle.model.get_input_embeddings().register_forward_pre_hook(note)
            try:
                return loss()
            finally:
                hook.remove()

        def note(_: Any, inputs: tuple[Tensor, ...]) -> None:
            seen.append(tuple(inputs[0].shape))

        meter = LiveBytes(10**12)
        handle._checkpoints.find_meter = lambda _: meter
        result = rehearse(handle, noted, *given, **options)
        handle._checkpoints.find_meter = lambda _: None
        found.append((result, options, seen.pop(0)))
        return result

    monkeypatch.setattr(rehearsal, "preflight", metered)
    return found


def test_the_longest_rows_are_rehearsed(
    settings: Callable[..., list[str]], rehearsed: list[Any], tmp_path: Path
) -> None:
    """And nothing of the run changes, also not what TRL counts."""
    accumulated = {"gradient_accumulation_steps": 2}
    sft.main(settings("ids", "with", **accumulated))
    sft.main(settings("ids", "without", **accumulated, skip_rehearsal=True))
    ((found, options, shape),) = rehearsed
    assert found.policy == "attention"
    assert options == {"has_optimizer_states": False, "num_forwards": 2}
    assert shape == (2, 40)
    names = ("step", "loss", "grad_norm", "num_tokens", "entropy", "mean_token_accuracy")
    lines = [
        [
            [line[name] for name in names]
            for line in read_metrics(tmp_path / output)
            if "loss" in line
        ]
        for output in ("with", "without")
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 2
    assert "rehearsal" in json.loads((tmp_path / "with" / "start.json").read_text())["seconds"]


@pytest.mark.parametrize("full", [False, True])
def test_pairs_are_rehearsed_with_their_reference(
    settings: Callable[..., list[str]], rehearsed: list[Any], full: bool
) -> None:
    dpo.main(settings("pairs", "out", full=full))
    ((found, _, shape),) = rehearsed
    assert found.fits
    longest = (12 + 6 + 5, 7 + 6 + 3)
    assert shape == (1, sum(longest) + 2 * 3)  # each answer ends with a token, and a prompt's last
    # token is in both branches; the pairs share nothing with each other


def test_pairs_that_share_their_prompt_have_it_once() -> None:
    sizes = {"prompt_ids": (90, 10), "chosen_ids": (5, 60), "rejected_ids": (5, 60)}
    table = Dataset.from_dict({name: [[1] * n for n in size] for name, size in sizes.items()})
    assert longest_row_first(table, shares=False).tolist() == [0, 1]  # 190 and 140 tokens
    assert longest_row_first(table, shares=True).tolist() == [1, 0]  # 100 and 130


def test_where_transformers_runs_the_layers_nothing_is_rehearsed(
    settings: Callable[..., list[str]], rehearsed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--gradient_checkpointing", "true"]
    sft.main([*settings("ids", "out", checkpoint="none", max_steps=1), *own])
    assert rehearsed == []
    assert "memory: not rehearsed, since transformers' own check" in capsys.readouterr().out


def test_a_run_that_is_out_of_memory_is_explained(
    settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what SFT's rows are predicted to take, and without what pairs would."""
    told = []

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def said(text: str, run: Any, config: Any, _: Any, unpredicted: str) -> RuntimeError:
        told.append((run.seq_len * run.batch_size, run.gradient_accumulation_steps, unpredicted))
        assert (text, config.num_hidden_layers) == ("CUDA out of memory.", 4)
        return memory_report.OutOfMemory("said")

    monkeypatch.setattr(MemoryCallback, "on_step_begin", full)
    monkeypatch.setattr(memory_report, "out_of_memory", said)
    for recipe, data in ((sft, "ids"), (dpo, "pairs")):
        with pytest.raises(memory_report.OutOfMemory, match="said"):
            recipe.main(settings(data, data, gradient_accumulation_steps=3))
    assert told == [(128, 3, ""), (128, 3, trl_memory.PAIRS)]
