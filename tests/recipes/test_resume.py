"""`--resume auto`: one command starts, goes on, and finds that a run has ended."""

import json
import os
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

from longctx_patch.checkpoints.disk import CantWriteError
from longctx_patch.checkpoints.manifest import BEGUN, MANIFEST
from longctx_patch.checkpoints.output_folder import resume_name
from longctx_patch.checkpoints.series import checkpoints_of
from longctx_patch.health.agreement import versions
from longctx_patch.recipes import exporting, identity
from longctx_patch.recipes.launch import one_message
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.settings import parse_settings
from longctx_patch.recipes.text_trainer import TextTrainer
from tests.checkpoints.test_disk import full_disk
from tests.recipes.conftest import Start, flags_of, numbers
from tests.tiny_llama import TINY_LLAMA


def test_one_command_starts_goes_on_and_ends(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = flags_of(resume="auto", save_every=1, keep_last=2, keep_every=2)
    output = start(*command)
    assert "resume: starting from the first step" in capsys.readouterr().out
    series, whole = checkpoints_of(output), numbers(output)
    assert [each.step for each in series.found()] == [2, 4, 5]
    shutil.rmtree(output / "final")
    shutil.rmtree(series.path_of(5))
    metrics = output / "metrics.jsonl"  # as a loss of power leaves it
    first, second, rest = metrics.read_text().split("\n", 2)
    metrics.write_text(f"\0\0{first}\n{second}\0\0\0\n{rest[:-20]}\0\0\n" + "\0" * 50)
    (series.path_of(4) / "manifest.json").unlink()  # killed while it was saved
    start(*command)
    said = capsys.readouterr().out
    assert "metrics.jsonl: line 5 is incomplete and left out." in said
    assert "a checkpoint is incomplete" in said
    assert f"resume: going on from {series.path_of(2)}" in said
    assert numbers(output) == whole
    assert (output / "final" / "README.md").is_file()
    # Where there is no whole checkpoint yet, it starts anew.
    shutil.rmtree(output / "final")
    for each in series.found():
        (each.path / "manifest.json").unlink()
    start(*command)
    assert "resume: starting from the first step" in capsys.readouterr().out
    assert numbers(output) == whole
    before = (output / "final" / "README.md").stat().st_mtime_ns
    start(*command)
    assert "resume: the run has ended" in capsys.readouterr().out
    assert (output / "final" / "README.md").stat().st_mtime_ns == before
    assert not list(output.glob(".*"))


def test_an_output_that_is_deleted_in_a_run_is_made_again(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The run ended with an error, and without the weights that it still had."""
    training_step = TextTrainer.training_step

    def deletes(trainer: TextTrainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 2:
            shutil.rmtree(tmp_path / "out")
        return training_step(trainer, *args, **kwargs)

    monkeypatch.setattr(TextTrainer, "training_step", deletes)
    output = start("--save-every", "4")
    assert f"{output} was deleted while the run goes on" in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(output)] == [3, 4, 5]
    assert [each.step for each in checkpoints_of(output).found()] == [4]
    assert (output / "final/adapter_model.safetensors").is_file()
    start("--resume", "auto")
    assert "resume: the run has ended" in capsys.readouterr().out


def test_checkpoints_of_older_versions_are_not_trained_over(start: Start) -> None:
    """They have no manifest, or another format: a run that starts anew saves over their steps."""
    output = start("--save-every", "2")
    shutil.rmtree(output / "final")
    for each in checkpoints_of(output).found():
        for name in (MANIFEST, BEGUN):
            (each.path / name).unlink()

    def refused(words: str) -> None:
        files = sorted(output.rglob("*"))
        for resume in ("auto", "yes"):
            with pytest.raises(ValueError, match=f"{words}.* Go on with the version that wrote it"):
                start("--resume", resume)
        assert sorted(output.rglob("*")) == files

    refused(r"checkpoint-4 is a checkpoint without manifest\.json")
    for each in checkpoints_of(output).found():
        old = output / f"checkpoints/step_{each.step:06d}"
        old.parent.mkdir(exist_ok=True)
        each.path.rename(old)
    refused("step_000004 is a checkpoint in the format of an older version")
    (output / "final").mkdir()
    (output / "settings.json").write_text('{"ended": true}')
    start("--resume", "auto")  # it has ended


def test_a_place_where_no_folder_can_be_is_named(start: Start, tmp_path: Path) -> None:
    """It was an error of mkdir, with its trace."""
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(tmp_path / "unmounted")
    file.write_text("mine")
    before = {path for path in tmp_path.iterdir() if path.name != "cache"}
    for place, words in ((link, f"is a link to {tmp_path / 'unmounted'}"), (file, "is a file")):
        for below, resume in product(("", "deep/er"), ("no", "auto")):
            with pytest.raises(ValueError, match=r"[gG]ive another output") as told:
                start(output=place / below, resume=resume)
            assert f"{place} {words}" in str(told.value)
    assert {path for path in tmp_path.iterdir() if path.name != "cache"} == before


def test_a_place_that_takes_no_files_is_named(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is mounted read-only takes none, also from root."""
    there = tmp_path / "there"
    there.mkdir()
    usual = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != there and usual(path, mode))
    for place, resume in product((there, there / "deep/er"), ("no", "auto")):
        with pytest.raises(ValueError, match=f"{there} takes no files of this user"):
            start(output=place, resume=resume)
    assert not list(there.iterdir())


def test_a_link_to_a_folder_is_one(start: Start, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    start(output=tmp_path / "link", max_steps=1)
    assert (tmp_path / "disk/final/README.md").is_file()


def test_a_run_without_its_record_is_told_from_files_of_others(
    start: Start, tmp_path: Path
) -> None:
    """Somebody has deleted settings.json: it was said that no run had begun there."""
    output = start("--save-every", "2")
    whole = numbers(output)
    (output / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"settings\.json is missing, by which --resume") as told:
        start("--resume", "auto")
    assert "the newest checkpoint-4" in str(told.value)
    assert "Go on from the newest whole one with --resume" in str(told.value)
    start("--save-every", "2", "--resume")  # as it says
    assert numbers(output) == whole
    assert (output / "settings.json").is_file()
    start("--resume", "auto")


@pytest.mark.parametrize(
    ("words", "line", "found"),
    [
        ([], "", "no"),
        ([], "resume: true", "yes"),
        ([], "resume: auto", "auto"),
        (["--resume"], "", "yes"),
        (["--resume", "auto"], "resume: no", "auto"),
        (["--resume", "no"], "resume: yes", "no"),
    ],
)
def test_resume_in_words(words: list[str], line: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "finetune.yaml"
    file.write_text(f"model: m\ntext: t\nseq_len: 64\noutput: out\n{line}\n")
    assert parse_settings(["--settings", str(file), *words]).resume == found


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"resume='aut'.*auto"):
        resume_name("aut")


def test_a_run_ends_with_one_message_and_goes_on(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk of its second checkpoint is full: nothing is left of torch's writers' traces."""
    run = partial(start, "--full", save_every=2, scheduler="constant", max_steps=4)
    whole, out = run(folder="whole"), run(max_steps=2)
    capfd.readouterr()
    with full_disk(), pytest.raises(SystemExit) as ended, one_message("finetune"):
        run("--resume")
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert said.count("could not write") == 1
    assert "Traceback" not in said
    assert f"{out / 'checkpoint-2'} is whole" in said
    run("--resume")
    assert numbers(out) == numbers(whole)
    assert len(numbers(out)) == 4


def test_a_run_that_is_ended_while_it_writes_its_model_writes_it_anew(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left half a model in final/, and a README of another."""
    run = partial(start, "--full", save_every=2, max_steps=2, resume="auto")
    whole, out = run(folder="whole") / "final", tmp_path / "out"

    def dies(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(exporting, "write_card", dies)
        with pytest.raises(CantWriteError, match="No space"):
            run()
    assert (out / "final.incomplete/model.safetensors").is_file()
    assert not (out / "final").exists()
    run()
    assert not (out / "final.incomplete").exists()
    names = [sorted(path.name for path in folder.iterdir()) for folder in (whole, out / "final")]
    assert names[0] == names[1]
    weights = [folder / "model.safetensors" for folder in (whole, out / "final")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert f'from_pretrained("{out / "final"}")' in (out / "final/README.md").read_text()


def test_what_changes_between_a_stop_and_its_resumption_is_refused(
    start: Start, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = tmp_path / "base", LlamaConfig(**TINY_LLAMA)

    def save_weights(seed: int) -> None:
        set_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)

    def change_config() -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))

    def change_version() -> None:
        monkeypatch.setattr(identity, "versions", lambda: versions() | {"peft": "0.1"})

    def change_text() -> None:
        text_file.write_text(text_file.read_text().replace("12 times", "13 times"))

    save_weights(0)
    run = partial(start, model=model, tokenizer="bytes", save_every=2, max_steps=3)
    run()
    run("--resume")
    names = list[str]()
    for change, name, words in (
        (lambda: save_weights(1), "weights", r"weights.model.safetensors is '.* bytes, sample"),
        (change_config, "config.rms_norm_eps", "rms_norm_eps is 0.001, the run has 1e-0[56]"),
        (change_version, "versions.peft", "versions.peft is '0.1', the run has"),
        (change_text, "rows", "(?s)rows is '.*data text.txt: .* bytes"),
    ):
        change()
        with pytest.raises(ValueError, match=words) as refused:
            run("--resume", *names)
        assert f"--allow-change {name}" in str(refused.value)
        names += ["--allow-change", name] if not names else [name]
    run("--resume", *names)


def test_groups_of_attention_are_no_other_world() -> None:
    """Tokens see others with them, so a resumed run would have other numbers."""
    assert not {"shifted_group", "also_train", "context", "stages"} & (
        identity.WORLD | identity.FREE
    )
    assert {"ring", "ulysses"} <= identity.WORLD
