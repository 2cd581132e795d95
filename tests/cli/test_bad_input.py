"""Bad input: one clear message with value, rule and fix, exit code 1, nothing written."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Run

WriteConfig = Callable[..., Path]

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}


def refuse_patch(run: Run, tmp_path: Path, model: object, *words: object) -> str:
    """The message of a refused `longctx patch`, which has written nothing."""
    out = tmp_path / "parent" / "run"
    result = run("patch", model, "--out", out, "--seq-len", 64, "--gpus", 4, *words)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    assert not out.parent.exists()
    return " ".join(result.stderr.split())


BAD_MODELS: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "gpt2"}, "", "model type 'gpt2' .*learned positions"),
    ({"model_type": "foo9"}, "", "`longctx families` prints what is supported."),
    ({"model_type": "qwen33"}, "", r"Did you mean 'qwen3'\?"),
    (
        {"rope_parameters": YARN},
        "--seq-len 999",
        r"reaches 256.* Replace its scaling \(yarn x4 from 64\): --rope theta",
    ),
    ({"rope_parameters": DYNAMIC}, "", "'dynamic'.*ranks would disagree.*--rope dynamic"),
    ({"vocab_size": 200, "pad_token_id": None}, "", "258 tokens.* vocab_size=200"),
]
BAD_OPTIONS = {
    "--gpus 8 --ulysses 8": "exceeds its 4 query heads.* ulysses_degree <= 4",
    "--ulysses 3": "--ulysses 3 .*must be 4.* Use --ulysses 1 or 2 or 4",
    "--sequence-degree 3": "--sequence-degree = 3 ranks per sequence, but 4.* 1, 2, 4",
    "--ulysses 2 --ring 2 --sequence-degree 2": (
        "--ulysses 2 x --ring 2 = 4, but --sequence-degree is 2"
    ),
    "--gpus 3 --nodes 2": "--gpus 3 over --nodes 2.* Use --gpus 4",
    "--seq-len 65": "65 tokens.* reaches 64.* --rope theta or --rope yarn",
    "--context 32": "context=32 with seq_len=64.* --context 64 or more",
    "--context 512 --allow-beyond-reach": "context=512 with allow_beyond_reach.* or give --rope",
    "--context 512 --rope theta --rope-theta 5e3": "rope theta 5000: the model has.* Leave it out",
    "--context 512 --rope longrope": "with 0 factors.*4 frequencies.*--rope-factors FILE",
    f"--context 512 --rope longrope --rope-factors {__file__}": "input.py: it can't be read",
    "--rope-factor 2": "rope factor 2.0 with rope kind 'none'.* belongs to yarn or llama3",
    "--rank 8 --full": "--rank 8 with --full.* Use --lora",
    "--shifted-group 64 --dpo": "--shifted-group 64 with --dpo.* Leave it out",
    "--shifted-group 1K": "shifted_group=1024 with seq_len=.* quarter",
    "--states-on-host --cpu": "--states-on-host with --cpu.* use one of them",
    "--states-on-host --load-in-4bit": "with --load-in-4bit.* no FSDP2",
    "--load-in-4bit": "load_in_4bit with the bare config.* Give a folder",
    "--load-in-4bit --full": "--load-in-4bit with --full.* Use --lora",
    "--attention-kept 0.5 --checkpoint full": (
        "attention_kept=0.5 with checkpoint='full'.* that keep it: checkpoint='attention'"
    ),
    "--data none.txt": "--data: .*none.txt.* no file",
}


@pytest.mark.parametrize(
    ("changes", "words", "message"), [*BAD_MODELS, *(({}, *each) for each in BAD_OPTIONS.items())]
)
def test_patch_refuses(
    run: Run,
    config: WriteConfig,
    tmp_path: Path,
    changes: dict[str, Any],
    words: str,
    message: str,
) -> None:
    assert re.search(message, refuse_patch(run, tmp_path, config(**changes), *words.split()))


@pytest.mark.parametrize(
    ("other", "content", "message"),
    [
        ("z.jsonl", b'{"x": 1}\n', "z.jsonl, line 1: no text in field 'text', there is: x"),
        ("z.jsonl", b"[]\n", "z.jsonl, line 1: a list, not an object"),
        ("z.png", b"\x89PNG\0", "z.png: .png files are not read"),
        ("z.md", b"\xfc", "z.md, line 1: not UTF-8 text"),
        ("z.jsonl.zst", b"", "z.jsonl.zst: .zst files are not read"),
        ("z.parquet", b"PAR1", "`datasets` reads the files of one kind"),
    ],
)
def test_patch_and_data_refuse_a_folder_for_the_same_file(
    run: Run, config: WriteConfig, tmp_path: Path, other: str, content: bytes, message: str
) -> None:
    """What stands in any file is found before a run folder is written, not by the run."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    words = ["--seq-len", 64, "--gpus", 1, "--data", folder]
    good = run("patch", config(), "--out", tmp_path / "run", *words)
    assert good.exit_code == 0, good.output
    (folder / other).write_bytes(content)
    assert message in refuse_patch(run, tmp_path, config(), "--data", folder)
    shown = run("data", tmp_path / "run")
    assert shown.exit_code == 1
    assert message in " ".join(shown.stderr.split())


def test_patch_reads_texts_beside_conversations_as_the_run_does(
    run: Run, config: WriteConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    chat = {"prompt": "a", "completion": "b"}
    (folder / "a.jsonl").write_text(json.dumps(chat) + "\n")
    (folder / "b.md").write_text("a text")
    message = refuse_patch(run, tmp_path, config(), "--data", folder)
    assert "b.md: a record with a field of text, among those with `prompt` and" in message


def test_patch_names_the_longest_of_records_that_are_too_long(
    run: Run, config: WriteConfig, tmp_path: Path
) -> None:
    rows = [{"input_ids": [1] * length} for length in (9, 80, 64, 99)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = refuse_patch(run, tmp_path, config(), "--data", tmp_path / "a.jsonl")
    assert "a.jsonl, line 2: 80 tokens, and rows have 64 at most. Give more (--seq-len), or" in said
    assert said.endswith("Of the first records 2 are too long; the longest has 99 tokens.")


def test_chats_need_trl(
    run: Run, config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL is an extra: `patch`, `data` and `train` name it before anything long."""
    monkeypatch.setitem(sys.modules, "trl", None)  # importing it now raises ImportError
    missing = 'needs TRL, which is not installed: pip install "longctx-patch[trl]".'
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(chat) + "\n")
    assert missing in refuse_patch(run, tmp_path, config(), "--data", tmp_path / "a.jsonl")
    made = tmp_path / "made"
    made.mkdir()
    for name in ("sft.yaml", "accelerate.yaml"):
        (made / name).write_text(f"data: [{tmp_path / 'a.jsonl'}]\n")
    for words in (("data", made), ("train", made), ("train", made, "--help")):
        result = run(*words)
        assert result.exit_code == 1
        assert missing in " ".join(result.stderr.split())


def test_patch_refuses_models_that_are_not_there(
    run: Run, config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refuse_patch(run, tmp_path, "nobody/nothing-8B")
    assert "is neither a file or folder in the current directory nor reachable" in message
    assert "give a local folder, a config.json, or set HF_HOME" in message
    assert "no such file or folder" in refuse_patch(run, tmp_path, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refuse_patch(run, tmp_path, tmp_path / "empty")
    (tmp_path / "empty/q4.gguf").write_bytes(b"GGUF\3")
    for gguf in (tmp_path / "empty", tmp_path / "empty/q4.gguf"):
        message = refuse_patch(run, tmp_path, gguf)
        assert "q4.gguf is a GGUF file" in message
        assert "from_pretrained(**place)" in message
    folder = config().parent
    monkeypatch.chdir(tmp_path)
    for mistyped in ("model/confi.json", "model/config"):  # the second could be a hub name
        assert "Did you mean 'model/config.json'?" in refuse_patch(run, tmp_path, mistyped)
    assert "can't be a hub name, which is OWNER/NAME" in refuse_patch(run, tmp_path, "a model")
    message = refuse_patch(run, tmp_path, folder)
    assert "has no weights" in message
    assert f"`longctx patch {folder / 'config.json'} ...`" in message
    classifier = config(architectures=["LlamaForSequenceClassification"])
    message = refuse_patch(run, tmp_path, classifier)
    assert "LlamaForSequenceClassification" in message
    assert "Take a checkpoint of a ...ForCausalLM" in message
    (folder / "config.json").write_text('{"model_type": ')
    assert "its config can't be read" in refuse_patch(run, tmp_path, folder / "config.json")


def test_a_hub_that_is_out_of_reach_is_said_in_seconds(
    run: Run, config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would try six times, with 23 seconds of waiting."""

    def asked(*_: object, **__: object) -> None:
        tries.append(1)
        raise ConnectionError("name or service not known")

    tries: list[int] = []
    waited: list[float] = []
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", asked)
    monkeypatch.setattr("time.sleep", waited.append)
    message = refuse_patch(run, tmp_path, "nobody/nothing-8B")
    assert "nor reachable under this name (name or service not known)" in message
    assert (len(tries), sum(waited)) == (3, 3)
    message = refuse_patch(run, tmp_path, config(), "--tokenizer", "nobody/nothing-8B")
    assert "tokenizer 'nobody/nothing-8B' is neither a file or folder" in message


def test_weights_in_8_bit_floating_point_are_refused(
    run: Run, config: WriteConfig, tmp_path: Path
) -> None:
    model = config(quantization_config={"quant_method": "fp8"}).parent
    weights = {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}
    save_file(weights, model / "model.safetensors")
    message = refuse_patch(run, tmp_path, model)
    assert "'fp8' in its config.json), which can be served but not trained" in message
    assert "AutoModelForCausalLM.from_pretrained(" in message
    for words in (("families", model), ("plan", model, "--gpus", "H200", "--seq-len", 64)):
        found = run(*words)  # both would lead to `longctx patch`
        assert (found.exit_code, "can be served but not trained" in found.output) == (1, True)


def test_patch_refuses_a_folder_that_holds_files(
    run: Run, config: WriteConfig, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    result = run("patch", config(), "--seq-len", 64, "--gpus", 2, "--out", out)
    assert result.exit_code == 1
    assert "holds files. Give a new or empty folder" in result.stderr
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    result = run("patch", config(), "--seq-len", 64, "--gpus", 2, "--out", tmp_path / "bad\udcff")
    assert "the path has to be text" in result.stderr
    assert not (tmp_path / "bad\udcff").exists()


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"model_type": "gpt2"}, "", "model type 'gpt2' is not supported"),
        ({}, "--ulysses 3 --nproc 2", "--ulysses 3 with --nproc 2.* Use --nproc 3"),
        ({}, "--ulysses 2 --ring 4 --nproc 4", "--ring 4 with --nproc 4.* Use --nproc 8"),
    ],
)
def test_verify_refuses(
    run: Run, config: WriteConfig, changes: dict[str, Any], words: str, message: str
) -> None:
    result = run("verify", config(**changes), *words.split(), "--json")
    assert result.exit_code == 1
    assert re.search(message, " ".join(result.stderr.split()))
    answer = json.loads(result.stdout)
    assert (answer["ok"], answer["cases"]) == (False, [])
    assert re.search(message, " ".join(answer["error"].split()))


def test_a_glob_that_the_shell_has_written_out(run: Run, tmp_path: Path) -> None:
    given = ["patch", "config.json", "--seq-len", 64, "--gpus", 2, "--out", tmp_path / "run"]
    for words in (["--data", "a.jsonl", "b.jsonl"], ["--eval-data=a.jsonl", "b.jsonl"]):
        result = run(*given, *words)
        assert result.exit_code == 2
        said = " ".join(result.stderr.split())
        assert "unexpected extra argument (b.jsonl). One source follows each --data" in said
        assert "quote a glob, --data 'texts/*.jsonl', or repeat the option" in said
    assert "a glob" not in run(*given, "b.jsonl").stderr
