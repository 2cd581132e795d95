"""What a trained model says of itself, and that no way of loading an adapter is silently wrong."""

import json
import os
import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from longctx_patch.cli.report_data import read_run
from longctx_patch.recipes import finetune, hub, sft
from longctx_patch.recipes.merge import find_adapter, merge
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.model_card import MARK
from tests.launching import start_forked
from tests.recipes.conftest import flags_of, lines_to_load, write_records

IDS = torch.arange(128)[None]


def train(base: Path, text: Path, output: Path, *flags: str) -> Path:
    given = flags_of(model=base, text=text, max_steps=2, learning_rate=1e-2, output=output)
    finetune.main([*given, *flags])
    return output / "final"


def test_an_adapter_with_a_longer_rope_warns_wherever_it_is_loaded(
    base: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = train(base, text_file, tmp_path / "out", "--seq-len", "128", "--rope", "yarn")
    said = capsys.readouterr().out
    assert f"Load the adapter as {final / 'README.md'} says" in said
    assert f"Next: longctx eval {final.parent} (" in said
    assert f"longctx report {final.parent}" in said
    with pytest.warns(UserWarning, match=MARK):
        wrong = AutoPeftModelForCausalLM.from_pretrained(final)
    right = lines_to_load(final)["model"]
    assert wrong.config.rope_parameters["rope_type"] == "default"  # the trap is still there
    assert not torch.allclose(wrong(IDS).logits, right(IDS).logits, atol=1e-4)
    config = AutoConfig.from_pretrained(final)
    plain = AutoModelForCausalLM.from_pretrained(base, config=config)
    assert torch.equal(right(IDS).logits, PeftModel.from_pretrained(plain, str(final))(IDS).logits)
    text = (final / "README.md").read_text()
    assert "Not with `AutoPeftModelForCausalLM`" in text
    assert f"longctx merge {final}" in text


def test_an_adapter_with_its_bases_rope_loads_either_way_and_warns_of_nothing(
    base: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = train(base, text_file, tmp_path / "out", "--seq-len", "64")
    assert "AutoPeft" not in capsys.readouterr().out + (final / "README.md").read_text()
    assert MARK not in json.loads((final / "adapter_config.json").read_text())
    loaded = AutoPeftModelForCausalLM.from_pretrained(final)
    assert torch.equal(loaded(IDS).logits, lines_to_load(final)["model"](IDS).logits)


def test_the_card_says_what_was_trained_on_what_and_how_it_ended(
    base: Path, text_file: Path, tmp_path: Path
) -> None:
    base = base.rename(tmp_path / 'b<i>"s')
    hostile = tmp_path / "a|b<script>\udcff.txt"
    hostile.write_text(text_file.read_text())
    flags = ("--seq-len", "256", "--rope", "linear", "--lora-rank", "3")
    final = train(base, hostile, tmp_path / "out", *flags)
    text = (final / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "peft"
    assert "base_model" not in yaml.safe_load(head)  # a folder is no name on the hub
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", body, re.MULTILINE))
    assert rows["trained"] == "LoRA adapter of rank 3, alpha 32"
    assert '# b&lt;i>"s, trained on long rows' in text
    assert lines_to_load(final)["model"].peft_config
    assert rows["data"] == r"a\|b&lt;script>\udcff.txt"  # its name, without folders and contents
    assert "times" not in text
    assert rows["rows"] == "256 tokens"
    assert rows["RoPE"] == "linear x4, rope_theta 10000; context of 256 tokens"
    assert rows["degrees"] == "ulysses 1 x ring 1"
    last = read_metrics(final.parent)[-1]
    assert (rows["step"], rows["loss"]) == ("2", f"{last['loss']:.6g}")
    assert f"torch {torch.__version__.split('+')[0]}" in rows["versions"]


def train_in(folder: Path, words: list[str]) -> None:
    os.chdir(folder)
    sft.main(words)


def test_a_run_over_trl_has_a_card_a_report_and_a_merged_model(base: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"What is {n}+2?", "completion": f"It is {n + 2}."} for n in range(4)]
    for name in ("pairs", "others"):
        write_records(tmp_path / f"{name}.jsonl", pairs)
    words = "--data pairs.jsonl --eval_data others.jsonl --rope yarn"
    words += " --eval_strategy epoch --seq_len 128 --num_train_epochs 2 --output_dir out"
    words += " --report_to none --use_cpu --logging_steps 1 --learning_rate 0.01"
    given = [*words.split(), "--model", str(base)]
    process = start_forked(train_in, tmp_path / "said", tmp_path, given)
    process.join(250)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    assert "longctx report out" in said
    final = tmp_path / "out/final"
    text = (final / "README.md").read_text()
    lines = read_metrics(tmp_path / "out")
    last = {name: line[name] for line in lines for name in ("loss", "eval_loss") if name in line}
    for name, value in last.items():
        assert f"| {name} | {value:.6g} |" in text
    assert len(last) == 2
    assert "| data | pairs.jsonl |" in text
    data = read_run(tmp_path / "out")
    assert data.state == f"Finished: 2 steps, saved to {final}."
    assert [step for step, _ in data.series["eval_loss"]] == [1, 2]
    assert (data.settings["rope"], data.settings["num_train_epochs"]) == ("yarn", 2)
    merged = merge(find_adapter(tmp_path / "out"), tmp_path / "merged").folder
    expected = lines_to_load(final)["model"].merge_and_unload()(IDS).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(merged)(IDS).logits, expected)


def test_a_whole_models_card_loads_it(base: Path, text_file: Path, tmp_path: Path) -> None:
    final = train(base, text_file, tmp_path / "out", "--seq-len", "64", "--full")
    assert "longctx merge" not in (final / "README.md").read_text()
    expected = AutoModelForCausalLM.from_pretrained(final)(IDS).logits
    assert torch.equal(lines_to_load(final)["model"](IDS).logits, expected)


class Hub:
    """Stands for huggingface_hub.HfApi, and records what it is asked for."""

    def __init__(self, *, fails: str = "", is_private: bool = True) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.fails, self.private = fails, is_private

    def __call__(self) -> "Hub":
        return self

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        self._note("create_repo", name, str(private), str(exist_ok))

    def repo_info(self, name: str) -> "Hub":
        self._note("repo_info", name)
        return self

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        files = sorted(path.name for path in folder_path.iterdir())
        self._note("upload_folder", repo_id, *files)

    def _note(self, *call: str) -> None:
        self.calls.append(call)
        if call[0] == self.fails:
            raise ConnectionError("no route to the hub\nat all")


PUSH = ("--seq-len", "64", "--push-to-hub", "me/model")


def test_final_is_uploaded_at_the_end(
    base: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    final = train(base, text_file, tmp_path / "out", *PUSH, "--hub-private")
    created, looked, uploaded = fake.calls
    assert created == ("create_repo", "me/model", "True", "True")
    assert looked == ("repo_info", "me/model")
    assert uploaded == ("upload_folder", "me/model", *sorted(p.name for p in final.iterdir()))
    assert {"README.md", "adapter_model.safetensors", "config.json"} <= set(uploaded)
    assert "uploaded to https://huggingface.co/me/model" in capsys.readouterr().out
    text = (final / "README.md").read_text()
    assert 'AutoConfig.from_pretrained("me/model")' in text
    assert "hf download me/model" in text


def test_a_hub_that_can_not_be_written_is_found_before_training(
    base: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the real library
    with pytest.raises(ValueError, match=r"push_to_hub 'me/model': no model can .*hf auth login"):
        train(base, text_file, tmp_path / "out", *PUSH)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(is_private=False))
    with pytest.raises(ValueError, match="exists and is public"):
        train(base, text_file, tmp_path / "out", *PUSH, "--hub-private")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="hub_private without push_to_hub"):
        train(base, text_file, tmp_path / "out", "--seq-len", "64", "--hub-private")


def test_a_failed_upload_leaves_the_model_and_says_how_to_go_on(
    base: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(fails="upload_folder"))
    again = re.escape(f"hf upload me/model {tmp_path / 'out/final'}")
    with pytest.raises(ValueError, match=rf"\(no route to the hub\).* To try again: {again}$"):
        train(base, text_file, tmp_path / "out", *PUSH)
    assert (tmp_path / "out/final/adapter_model.safetensors").is_file()


def test_one_process_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Hub(fails="create_repo")
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    hub.require_repository("me/model", private=False, asks=False)
    assert not fake.calls
    with pytest.raises(ValueError, match="no route to the hub"):
        hub.require_repository("me/model", private=False, asks=True)
