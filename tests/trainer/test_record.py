"""What a run that resumes says of `longctx.json`."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from longctx_patch import LongContextConfig
from longctx_patch.checkpoints.manifest import seal
from longctx_patch.trainer.record import RECORD, log_changes, resume_problems, write_record
from tests.plugin.launched import run_launched
from tests.trainer.trained import Case, make_trainer

SAVED = Case("saved", arguments={"max_steps": 1, "save_strategy": "steps", "save_steps": 1})


def run_of(num_processes: int, *, has_mask: bool = False, **config: Any) -> dict[str, Any]:
    made = LongContextConfig(**config)
    return {
        "num_processes": num_processes,
        "sequence_degree": made.sequence_degree,
        "has_mask": has_mask,
        "config": asdict(made),
    }


@pytest.mark.parametrize(
    ("now", "level", "text"),
    [
        (run_of(2, ring_degree=2), 0, ""),
        (run_of(1), logging.INFO, r"ring_degree=1 (was 2), num_processes=1 (was 2)"),
        (run_of(2, ring_degree=2, loss="logits"), logging.INFO, "loss='logits' (was 'chunked')"),
        (run_of(4, ring_degree=2), logging.WARNING, "replicas=2 (was 1): as with a stock trainer"),
    ],
)
def test_what_differs_is_logged(
    now: dict[str, Any], level: int, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_record(tmp_path, run_of(2, ring_degree=2))
    with caplog.at_level(logging.INFO):
        log_changes(tmp_path, now)
    assert [record.levelno for record in caplog.records] == [level] * bool(level)
    assert text in caplog.text


def test_another_model_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its weights would be loaded by their names, and give other numbers."""
    run = run_of(1)
    fields = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5.0}, "gone": 1}
    write_record(tmp_path, run | {"model": fields})
    log_changes(tmp_path, run | {"model": fields | {"new": 2}})
    log_changes(tmp_path, run)  # of an older version
    assert not caplog.records
    log_changes(tmp_path, run | {"model": fields | {"rope_parameters": {"rope_theta": 6.0}}})
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    words = "rope_parameters={'rope_theta': 6.0} (was {'rope_theta': 5.0})"
    assert said.getMessage().endswith(f"so its numbers are others: {words}")


def test_another_mask_is_refused(tmp_path: Path) -> None:
    masked, causal = run_of(2, has_mask=True), run_of(2)
    assert not list(resume_problems(tmp_path, masked)), "a stock trainer leaves no record"
    write_record(tmp_path, masked)
    assert not list(resume_problems(tmp_path, masked))
    (problem,) = resume_problems(tmp_path, causal)
    assert "was trained with a mask" in problem


def resume_without_the_mask(folder: str) -> str:
    make_trainer(SAVED, folder, is_patched=True).train()
    record = Path(folder) / "checkpoint-1" / RECORD
    found = json.loads(record.read_text())
    assert found["has_mask"] is False
    assert found["model"]["num_hidden_layers"] == 2
    record.write_text(json.dumps(found | {"has_mask": True}))
    seal(record.parent)
    with pytest.raises(ValueError, match="was trained with a mask") as caught:
        make_trainer(SAVED, folder, is_patched=True).train(resume_from_checkpoint=True)
    return str(caught.value)


def test_a_trainer_reads_the_record_when_it_resumes(tmp_path: Path) -> None:
    (said,) = run_launched(resume_without_the_mask, 1, str(tmp_path))
    assert "checkpoint-1" in said
