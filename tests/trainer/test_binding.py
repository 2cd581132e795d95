"""Who is told that the config's checkpointing runs in place of transformers'."""

import logging
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import SFTConfig

from longctx_patch import LongContextConfig
from longctx_patch.trainer.binding import settle_checkpointing

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")


@pytest.mark.parametrize(
    ("kind", "is_main", "level"),
    [
        (TrainingArguments, True, logging.WARNING),
        (TrainingArguments, False, logging.INFO),
        (SFTConfig, True, logging.INFO),  # it is on by TRL's default
    ],
)
def test_checkpointing_that_gives_way_is_warned_of_where_it_was_asked_for(
    kind: type[TrainingArguments],
    is_main: bool,
    level: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrainingArguments, "should_log", is_main)
    asked = {} if kind is SFTConfig else {"gradient_checkpointing": True}
    args = kind(output_dir=str(tmp_path), use_cpu=True, report_to=[], **asked)
    with caplog.at_level(logging.INFO):
        settle_checkpointing(args, LongContextConfig(checkpoint="full"))
    (record,) = [r for r in caplog.records if r.name.startswith("longctx_patch")]
    assert record.levelno == level
    assert "gives way to LongContextConfig(checkpoint='full')" in record.getMessage()
    assert args.gradient_checkpointing is False
