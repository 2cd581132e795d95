"""Files and flags of the three recipes are read by the same rules: nothing is dropped, nothing is
taken for something else, and the nearest right name is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import DPOConfig, SFTConfig

from longctx_patch.recipes.launch import check_launcher
from longctx_patch.recipes.settings import parse_settings
from longctx_patch.recipes.settings_file import file_and_flags
from longctx_patch.recipes.trl_settings import parse
from longctx_patch.recipes.yaml_file import read_yaml

# Of TRL\'s own defaults.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TRL = "data: a\nmodel: m\nseq_len: 64\noutput_dir: out\nuse_cpu: true\nbf16: false\n"
RECIPES: dict[str, tuple[Callable[[list[str]], Any], str, str]] = {
    "finetune": (parse_settings, "--settings", "text: a\nmodel: m\nseq_len: 64\noutput: out\n"),
    "sft": (lambda given: parse(SFTConfig, given), "--config", TRL + "report_to: none\n"),
    "dpo": (lambda given: parse(DPOConfig, given), "--config", TRL + "report_to: none\n"),
}
IN_FILES = {
    "max_steps: 3\nmax_steps: 4\n": r"line \d+: 'max_steps' is given twice, first in line \d",
    "max_steps: 010\n": r"line \d+: YAML reads 010 to base 8 or 60.*in plain digits",
    "tokenizer: 1:30\n": r"line \d+: YAML reads 1:30 .*in quotes: '1:30'",
    "save_steps: " + "[" * 5000: "nested too deeply for settings",
    "maxsteps: 3\n": "unknown setting maxsteps. Did you mean 'max_steps'",
    "max-steps: 3\n": "unknown setting max-steps. Did you mean 'max_steps'",
    "qwertz: 3\n": "unknown setting qwertz. docs/reference/config.md lists all",
    "1: 2\n": "unknown setting 1",
    "max_steps: 3.5\n": "max_steps: 3.5 should be of type int",
    "max_steps: true\n": "max_steps: True should be of type int",
    "max_steps: many\n": "max_steps: 'many' should be of type int",
    "max_steps:\n": "max_steps: None should be of type int",
    "learning_rate: fast\n": "learning_rate: 'fast' should be of type float",
    "learning_rate: [1]\n": r"learning_rate: \[1\] should be of type float",
    "full: 'false'\n": "full: 'false' should be of type bool",
    "tokenizer: 3\n": "tokenizer: 3 should be of type str",
    "\tmax_steps: 3\n": r"is not YAML: .*line \d+, .*indented by spaces, not by tabs",
    "? {a: b}\n: c\n": "is not YAML: while constructing a mapping",
}
IN_FLAGS = {
    "--max-step 3": "unknown flag --max-step. Did you mean '--max_steps'",
    "--max-steps many": "--max-steps: invalid int value: 'many'",
    "--max-steps": "--max-steps: expected one argument",
    "--qwertz=3": "unknown flag --qwertz. --help lists all flags",
    "stray": "unknown flag stray",
}
ELSEWHERE = {
    "finetune": {
        "--per-device-train-batch-size 2": "Here it is called --batch_size",
        "--data x": "Here it is called --text",
        "--config x.yaml": "Here it is called --settings",
        "--epochs 3": "Here it is called --num_train_epochs",
    },
    "sft": {
        "--batch-size 2": "Here it is called --per_device_train_batch_size",
        "--text x": "Here it is called --data",
        "--settings x.yaml": "Here it is called --config",
        "--epochs 3": "Here it is called --num_train_epochs",
    },
}
ELSEWHERE["dpo"] = ELSEWHERE["sft"]


def given(recipe: str, folder: Path, more: str = "") -> list[str]:
    _, flag, content = RECIPES[recipe]
    file = folder / "run.yaml"
    file.write_text(content + more)
    return [flag, str(file)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_file_may_not_have(recipe: str, tmp_path: Path) -> None:
    read = RECIPES[recipe][0]
    for more, message in IN_FILES.items():
        with pytest.raises(ValueError, match=f"run.yaml.*{message}"):
            read(given(recipe, tmp_path, more))
    for content, message in {
        b"[]": "run.yaml holds a list, not lines of",
        b"3": "run.yaml holds a int",
        b"a: [": "run.yaml is not YAML: .*line 1",
        b"model: \xfc": r"run.yaml is not UTF-8 text \(byte 7\)",
        b"": "is not set. Give --",
    }.items():
        words = given(recipe, tmp_path)
        Path(words[1]).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read(words)


@pytest.mark.parametrize("recipe", RECIPES)
def test_flags_that_are_none(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read, flag, _ = RECIPES[recipe]
    for words, message in (IN_FLAGS | ELSEWHERE[recipe]).items():
        with pytest.raises(ValueError, match=message):
            read([*given(recipe, tmp_path), *words.split()])
    for wrong in ([flag], [flag, "--max-steps"], [flag, "a", flag, "b"]):
        with pytest.raises(ValueError, match=f"{flag} (without a file|names a and b)"):
            read(wrong)
    with pytest.raises(ValueError, match=r"none.yaml: no such file"):
        read([f"{flag}=none.yaml"])
    assert capsys.readouterr().err == ""  # no pages of usage


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_values_of_trl_get_their_type(recipe: str, tmp_path: Path) -> None:
    """Both spellings of a flag; YAML 1.1 reads 1e-4 as a text; one path is a list of one."""
    more = "learning_rate: 1e-4\nmax_steps: 7\ndata_shares: [1]\nlora_targets: q_proj\n"
    for flag in ("--save-steps", "--save_steps"):
        settings, args = RECIPES[recipe][0]([*given(recipe, tmp_path, more), flag, "9"])
        assert (args.learning_rate, args.max_steps, args.save_steps) == (1e-4, 7, 9)
        assert (settings.data, settings.data_shares) == (["a"], [1.0])
        assert settings.lora_targets == ["q_proj"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_output_has_either_name(recipe: str, tmp_path: Path) -> None:
    """In a file and as a flag, in either spelling; both in one file are refused."""
    read = RECIPES[recipe][0]

    def output(words: list[str]) -> str:
        found = read(words)
        return str(found.output if recipe == "finetune" else found[1].output_dir)

    file = given(recipe, tmp_path)
    for words in ("--output x", "--output-dir x", "--output_dir=x", "--output=x"):
        assert output([*file, *words.split()]) == "x"
    name = "output" if recipe == "finetune" else "output_dir"
    other = "output_dir" if recipe == "finetune" else "output"
    with pytest.raises(ValueError, match=f"both {other} and {name} are set"):
        read(given(recipe, tmp_path, f"{other}: y\n"))
    Path(file[1]).write_text(RECIPES[recipe][2].replace(f"{name}: out", f"{other}: y"))
    assert output(file) == "y"


def test_the_file_is_taken_wherever_it_is_named() -> None:
    for words in (["--config", "a", "--b", "c"], ["--b", "c", "--config=a"]):
        assert file_and_flags("--config", words) == (Path("a"), ["--b", "c"])
    assert file_and_flags("--config", ["--b"]) == (None, ["--b"])


def test_a_launch_file_is_read_by_the_same_rules(tmp_path: Path) -> None:
    """Accelerate would take the last of two values."""
    file = tmp_path / "accelerate.yaml"
    file.write_text("num_processes: 2\nfsdp_config:\n  a: 1\n  a: 2\n")
    with pytest.raises(ValueError, match=r"accelerate.yaml, line 4: 'a' is given twice, .*line 3"):
        check_launcher(tmp_path / "finetune.yaml")


def test_good_files_are_read_as_yaml_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    text = "x: &base {a: 1, b: [1.5, yes, null]}\ny:\n  <<: *base\n  a: 2\nz: 'ü'\n"
    file.write_text(text, encoding="utf-8")
    assert read_yaml(file) == yaml.safe_load(text)


@pytest.mark.parametrize("asked", ["", "gradient_checkpointing: true\n"])
def test_checkpoint_alone_says_what_is_recomputed(tmp_path: Path, asked: str) -> None:
    """TRL recomputes every layer by default, also where nothing should be."""
    file = tmp_path / "sft.yaml"
    file.write_text(TRL + "report_to: none\ncheckpoint: none\n" + asked)
    _, args = parse(SFTConfig, ["--config", str(file)])
    assert args.gradient_checkpointing == bool(asked)


def test_how_to_recompute_needs_what_is_recomputed() -> None:
    flags = "--data a --model m --seq_len 64 --output_dir out --use_cpu --bf16 false"
    kwargs = ["--gradient_checkpointing_kwargs", '{"use_reentrant": false}']
    own = ["--checkpoint", "none", "--gradient_checkpointing", "true"]
    with pytest.raises(ValueError, match=r"kwargs=.* without gradient_checkpointing.*is auto"):
        parse(SFTConfig, [*flags.split(), *kwargs])
    assert parse(SFTConfig, [*flags.split(), *kwargs, *own])[1].gradient_checkpointing
