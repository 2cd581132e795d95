"""A run that goes on in other worlds, one after the other, has the losses of an undisturbed run."""

import os
import shutil
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longctx_patch.checkpoints.plain_pickle import MetadataReader
from longctx_patch.checkpoints.series import checkpoints_of
from longctx_patch.recipes import finetune, models
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.settings import parse_settings
from longctx_patch.recipes.text_sources import evaluation_rows, rows_of_run
from tests.plugin.launched import run_in_turn, run_launched, sharding_on_cpus
from tests.recipes.conftest import flags_of, write_records
from tests.recipes.test_sharded_reading import FSDP2

WORLDS: list[tuple[list[str], bool]] = [
    (["--ulysses", "2", "--checkpoint", "none", "--batch-size", "2"], False),
    (["--ring", "2", "--layout", "zigzag", "--checkpoint", "full", "--batch-size", "2"], False),
    (["--ring", "2", "--layout", "contiguous", "--checkpoint", "attention"], True),
    (["--checkpoint", "none"], False),  # two replicas
    (["--ring", "2", "--checkpoint", "full", "--batch-size", "2"], True),
]
"""Flags of two processes, and whether they shard weights (FSDP2). Each trains for two steps of two
rows."""
ACCUMULATED = (2,)
"""Worlds whose step is two forwards of one row."""
ALONE = ["--batch-size", "2"]


OF_FOUR = ["--ring", "2", "--checkpoint", "none"]
"""Flags of four processes, two replicas."""
DOCUMENTS = (200, 11, 3, 64, 23, 150, 40, 7, 35, 63, 18, 90)
"""Tokens of the documents, over and over: rows of one long one, and of short ones packed."""


def command(config_file: Path, text_file: Path, output: Path) -> list[str]:
    held_out = text_file.with_name("held_out.txt")
    held_out.write_text("".join(f"{n} and {n + 1} are {2 * n + 1}.\n" for n in range(99))[:447])
    text, edges = text_file.read_text(), [0, *accumulate(DOCUMENTS * 7)]
    parts = ({"text": text[start : stop - 1]} for start, stop in pairwise(edges))
    documents = write_records(text_file.with_name("documents.jsonl"), parts)
    given = flags_of(model=config_file, text=documents, output=output, seq_len=64)
    given += flags_of(eval_data=held_out, mixture="prolong", scheduler="constant")
    return [*given, "--full", *flags_of(save_every=2, resume="auto")]


def go_through_world(number: int, usual: list[str]) -> None:
    """It stops after its steps, and the next one goes on."""
    flags, shards = WORLDS[number]
    for name, value in FSDP2.items():
        os.environ.pop(name, None)
        if shards:
            os.environ[name] = value
    more = ["--gradient-accumulation-steps", "2"] if number in ACCUMULATED else []
    with sharding_on_cpus() if shards else nullcontext():
        finetune.main([*usual, *flags, *more, "--max-steps", str(2 * number + 2)])


def is_sharded(checkpoint: Path) -> bool:
    """Whether each rank has written a part of a weight."""
    kept = MetadataReader(checkpoint / "optimizer_state").read_metadata().state_dict_metadata
    weight: Any = kept["model.model.layers.0.mlp.up_proj.weight"]
    return len(weight.chunks) == 2


@pytest.mark.timeout(300)
def test_losses_are_those_of_an_undisturbed_run_whatever_the_world(
    config_file: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other numbers of ranks, degrees, layouts, checkpoint policies, replicas and FSDP2, over a
    mixture of long documents and packed short ones. So are the losses on seven rows that are held
    out, which each world evaluates at its end."""
    disturbed = command(config_file, text_file, tmp_path / "disturbed")
    run_in_turn(2, *((go_through_world, (number, disturbed)) for number in range(len(WORLDS))))
    steps = 2 * len(WORLDS) + 4
    run_launched(finetune.main, 4, [*disturbed, *OF_FOUR, "--max-steps", str(steps - 2)])
    finetune.main([*disturbed, *ALONE, "--max-steps", str(steps)])
    assert f"going on from {tmp_path}/disturbed/checkpoint-{steps - 2}" in (capsys.readouterr().out)
    for number, (_, shards) in enumerate(WORLDS):
        assert is_sharded(checkpoints_of(tmp_path / "disturbed").path_of(2 * number + 2)) is shards
    whole = command(config_file, text_file, tmp_path / "whole")
    settings = parse_settings(whole)
    rows = rows_of_run(settings, models.load_tokenizer(settings))
    assert {len(row["seq_lengths"]) == 1 for row in rows} == {True, False}
    epochs = str((steps - 0.5) * 2 / len(rows))
    finetune.main([*whole, *ALONE, "--num-train-epochs", epochs, "--eval-steps", "2"])
    ours, theirs = (read_metrics(tmp_path / name) for name in ("disturbed", "whole"))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert len(ours) == steps
    assert len({line["loss"] for line in ours}) == steps
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine["tokens"] == wanted["tokens"]
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=0, abs=1e-5)
        assert mine.get("eval_loss", 0) == pytest.approx(wanted.get("eval_loss", 0), abs=1e-5)
    assert [line["step"] for line in ours if "eval_loss" in line] == [*range(2, steps + 1, 2)]
    assert {line.get("eval_tokens", 7 * 63) for line in ours} == {7 * 63}
    assert theirs[-1]["eval_loss"] == pytest.approx(stock_loss(whole), rel=1e-5)


@pytest.mark.timeout(300)
def test_stages_of_rows_go_on_in_another_world(
    config_file: Path, text_file: Path, tmp_path: Path
) -> None:
    """From a step before rows get longer, whose ranks were two."""
    stages = ["--stages", "32:3,64:3"]
    disturbed = [*command(config_file, text_file, tmp_path / "disturbed"), *stages]
    run_launched(finetune.main, 2, [*disturbed, "--ring", "2"])
    over_two = read_metrics(tmp_path / "disturbed")
    for late in ("checkpoint-4", "checkpoint-6", "final"):
        shutil.rmtree(tmp_path / "disturbed" / late)  # as if it had stopped in step 3
    finetune.main(disturbed)
    finetune.main([*command(config_file, text_file, tmp_path / "whole"), *stages])
    whole, ours = (read_metrics(tmp_path / name) for name in ("whole", "disturbed"))
    assert [line["seq_len"] for line in whole] == [32, 32, 32, 64, 64, 64]
    for lines in (over_two, ours):
        assert [line["loss"] for line in lines] == pytest.approx(
            [line["loss"] for line in whole], rel=0, abs=1e-5
        )
        assert [line["tokens"] for line in lines] == [line["tokens"] for line in whole]


def stock_loss(arguments: list[str]) -> float:
    """The loss of the final model, without us, on the rows that are held out."""
    settings = parse_settings(arguments)
    rows = evaluation_rows(settings, models.load_tokenizer(settings))
    assert rows is not None
    ids = torch.tensor([row["input_ids"] for row in rows])
    model = AutoModelForCausalLM.from_pretrained(Path(settings.output) / "final")
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()
