"""Recipes over TRL refuse what can't be right before it costs anything."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from longctx_patch.recipes import sft
from tests.recipes.conftest import write_records
from tests.recipes.trl_jobs import invoke, make_job, patch


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return make_job(tmp_path)


def refused(job: Path, *options: str) -> str:
    """What it says when it writes none."""
    found = invoke(job, *options)
    assert found.exit_code == 1
    assert not (job / "run").exists()
    return found.output


SAYS: dict[str, str] = {
    "--data {}/pairs.jsonl": "add --dpo to learn from them",
    "--data {}/chats.jsonl --dpo": "--dpo with records that have",
    "--data {}/chats.jsonl --data {}/texts.jsonl": "--data holds records of different kinds",
    "--data {}/chats.jsonl --eval-data {}/gone.jsonl": r"--eval-data: no data at '.*gone.jsonl'",
    "--data {}/empty.jsonl": "its files hold no records",
    "--data {}/ids.jsonl": r"ids.jsonl, line 1: input_ids.1. is 4000, and the model has vocab_size",
    "--data {}/pairs.jsonl --sft --dpo": "Choose one",
}


@pytest.mark.parametrize("options", SAYS)
def test_data_that_a_run_folder_is_not_made_for(job: Path, options: str) -> None:
    write_records(job / "empty.jsonl", [])
    write_records(job / "ids.jsonl", [{"input_ids": [3, 4000]}])
    words = options.replace("{}", str(job)).split()
    found = refused(job, *words)
    assert re.search(SAYS[options], found)
    assert found.count(words[-1]) <= 1, "a source is named once"


def test_what_patch_says_of_text_that_is_evaluated(job: Path) -> None:
    """Texts stay with the recipe for texts, also with --eval-data, and with --sft records are rows.
    --text-field, --eval-data and --too-long reach the settings file."""
    texts = [{"body": " ".join(f"w{n}" for n in range(number))} for number in (60, 150, 20)]
    data = str(write_records(job / "learned.jsonl", texts))
    held_out = str(write_records(job / "bodies.jsonl", texts))
    options = ["--data", data, "--eval-data", held_out, "--text-field", "body"]
    assert "--too-long cut drops the end" in refused(job, *options, "--sft")
    said = patch(job, *options)
    assert re.search(r"evaluation +\S+bodies.jsonl", said)
    settings = yaml.safe_load((job / "run" / "finetune.yaml").read_text())
    assert (settings["eval_data"], settings["eval_steps"]) == ([held_out], 25)
    assert "--save-every N --eval-steps N" in (job / "run" / "README.md").read_text()
    shutil.rmtree(job / "run")
    patch(job, *options, "--sft", "--too-long", "split")
    settings = yaml.safe_load((job / "run" / "sft.yaml").read_text())
    assert (settings["text_field"], settings["too_long"]) == ("body", "split")
    assert "--save-steps N --eval-steps N" in (job / "run" / "README.md").read_text()


def test_options_for_records_with_joined_text_are_refused(job: Path) -> None:
    found = refused(job, "--data", str(job / "texts.jsonl"), "--too-long", "cut")
    assert "--too-long cut with plain text: rows are cut from the joined text" in found


BEST = "--eval-strategy steps --eval-steps 10 --load-best-model-at-end true"
FLAGS: dict[str, str] = {
    "--report-to comet_ml": "report_to: comet_ml: .*comet",
    "--eval-strategy epoch": "eval_strategy=epoch without anything to evaluate",
    "--early-stopping 2": "early_stopping=2 without load_best_model_at_end",
    BEST: "not a round multiple of 10. .*give --save_steps too, a multiple of --eval_steps",
    "--max-length 50": "max_length=50 with seq_len=96",
    "--data-shares 1 2": "2 data_shares for 1 sources",
    "--streaming": "streaming without max_steps",
    "--streaming --data a b": "streaming with 2 sources of data",
    "--resume": "there is no complete checkpoint under",
    "--output-dir trainer_output": "output_dir is not set",
    "--push-to-hub 1": "push_to_hub without hub_model_id",
    "--skip-bad-steps -1": "skip_bad_steps=-1: a number of steps, 0 or more",
    "--sentinel-every -2": "sentinel_every=-2: a number of steps",
    "--keep-every 4": "keep_every=4 with",
    "--too-long cut --eval-share 1": "eval_share=1.0: a part",
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own defaults
@pytest.mark.parametrize("flags", FLAGS)
def test_settings_that_exclude_each_other(job: Path, flags: str) -> None:
    patch(job, "--data", str(job / "chats.jsonl"))
    with pytest.raises(ValueError, match=FLAGS[flags]):
        sft.main(["--config", str(job / "run" / "sft.yaml"), *flags.split()])
    assert not (job / "run" / "training").exists()
