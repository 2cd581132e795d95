"""Settings from flags and YAML, and what is refused before anything is loaded."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from longctx_patch.config import LongContextConfig
from longctx_patch.recipes.settings import SHORT_NAMES, Settings, parse_settings

NEEDED = ["--model", "m", "--text", "a.txt", "b", "--seq-len", "64", "--output", "out"]


def test_packed_rows_are_placed_balanced_unless_a_layout_is_asked_for() -> None:
    for flags, wanted in (([], "balanced"), (["--layout", "zigzag"], "zigzag")):
        settings = parse_settings([*NEEDED, "--pack", "--ring", "2", *flags])
        assert settings.sequence_parallelism().packed_placement == wanted


def test_flags_win_over_the_file_and_yaml_numbers_get_their_type(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-4 as a string, so numbers are converted to their field's type."""
    file = tmp_path / "finetune.yaml"
    file.write_text(
        "model: m\ntext: one.txt\nseq_len: 64\noutput: out\nlearning_rate: 1e-4\n"
        "max_grad_norm: 2\nrope_factor: null\nmax_steps: 7\nfull: true\n"
    )
    settings = parse_settings(["--settings", str(file), "--max-steps", "9"])
    assert settings.learning_rate == 1e-4
    assert settings.max_grad_norm == 2.0
    assert settings.text == ["one.txt"]
    assert settings.max_steps == 9
    assert settings.rope_factor is None
    assert not settings.uses_lora


def test_names_of_tasks_may_be_joined_by_commas() -> None:
    for given in (["passkey,vt"], ["passkey", "vt"]):
        settings = parse_settings([*NEEDED, "--eval-context-tasks", *given])
        assert settings.eval_context_tasks == ["passkey", "vt"]


def test_a_flag_takes_back_its_opposite_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "finetune.yaml"
    for named, flag, uses_lora in (("lora", "--full", False), ("full", "--lora", True)):
        file.write_text(f"model: m\ntext: a\nseq_len: 64\noutput: out\n{named}: true\n")
        assert parse_settings(["--settings", str(file), flag]).uses_lora is uses_lora
        assert parse_settings(["--settings", str(file)]).uses_lora is not uses_lora
        with pytest.raises(ValueError, match="both lora and full"):
            parse_settings(["--settings", str(file), "--lora", "--full"])
    file.write_text("lora: true\nfull: true\n")
    with pytest.raises(ValueError, match="both lora and full"):
        parse_settings([*NEEDED, "--settings", str(file)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq-len", "1"], "2 tokens or more.*--seq-len 32768"),
        (["--lora", "--full"], "both lora and full.*--lora or --full"),
        (["--pack", "--one-document-per-row"], "both pack and one_document.*Choose one: --pack"),
        (["--model", ""], "Give --model"),
        (["--batch-size", "0"], "batch_size=0.*1 or more"),
        (["--lora-dropout", "1.0"], "lora_dropout=1.0"),
        (["--load-in-4bit", "--full"], "load_in_4bit with full.*Use --lora --dtype bfloat16"),
        (["--load-in-4bit", "--dtype", "float32"], "load_in_4bit with dtype=float32"),
        (["--full", "--also-train", "norms"], "also_train=norms with full: every weight"),
        (["--also-train", "norms,head"], "also_train='head': choose one of embeddings, norms"),
        (["--scheduler", "constant", "--warmup-steps", "3"], "Use --scheduler constant_with"),
        (["--max-steps", "3", "--warmup-steps", "4"], "warmup_steps=4 with max_steps=3: .*Give 3"),
        (["--ulysses", "0"], "ulysses_degree=0"),
        (["--mlp-tiles", "0"], "mlp_tiles=0: it counts tiles.*Use mlp_tiles=1"),
        (["--layout", "spiral"], "layout='spiral'"),
        (["--loss", "mean"], "loss='mean': choose one of chunked, logits"),
        (["--keep-every", "4"], "keep_every=4 without keep_last"),
        (["--keep-every", "4", "--keep-last", "1", "--save-every", "3"], "multiple of save_every"),
        (["--keep-last", "-1"], "keep_last=-1: it must be 0 or more"),
    ],
)
def test_refusals_name_value_rule_and_fix(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_settings([*NEEDED, *flags])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("steps: 3\n", "unknown setting steps. Here it is called max_steps"),
        (
            "ulysses_waves: null\nmax_loss_spike: 5\n",  # the first asked for nothing
            "unknown setting max_loss_spike. A loss that jumps .*max_grad_norm",
        ),
        ("fused_layers: trition\n", "fused_layers='trition': choose one of auto, liger, compile"),
        ("scheduler: cos\n", "scheduler='cos': choose one of cosine"),
        ("rope: ntk\n", "rope='ntk': choose one of none, theta, yarn"),
        ("context: 63\n", "context=63 with seq_len=64: rows would be longer.*--context 64 or"),
    ],
)
def test_a_wrong_file_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "finetune.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_settings([*NEEDED, "--settings", str(file)])


def test_a_flag_that_went_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"--ulysses-waves.*Heads are exchanged all at once.*out"):
        parse_settings([*NEEDED, "--ulysses-waves", "2"])


def test_help_is_the_docstring_of_the_configs_field() -> None:
    helps = {field.name: field.metadata["help"].replace("%%", "%") for field in fields(Settings)}
    source = " ".join(inspect.getsource(LongContextConfig).split())
    for field in fields(LongContextConfig):
        said = helps[SHORT_NAMES.get(field.name, field.name)]
        assert f'"""{said}"""' in source, field.name
