"""The recipe in this process: training, saving, loading with stock libraries, resuming exactly."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, set_seed

from longctx_patch.health.pace import PaceCheck
from longctx_patch.recipes import finetune, models
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.stages import START_FILE
from longctx_patch.recipes.text_trainer import StepTrainer
from tests.recipes.conftest import (
    Start,
    flags_of,
    lines_to_load,
    numbers,
    settings_of,
    write_documents,
)

STAGES = ["processes", "data", "model", "weights", "rehearsal", "first step"]


@pytest.fixture
def run(start: Start) -> Start:
    return partial(start, max_steps=4, learning_rate=1e-2)


class OneIsSlow(PaceCheck):
    """Knows of a slow rank after step 3, if the batches went through it."""

    def loading(self, batches: Any) -> Any:
        self.loads = True
        return super().loading(batches)

    def after_step(self, step: int) -> str:
        super().after_step(step)
        return "rank 1 is slow" if step == 3 and self.loads else ""


def test_metrics_have_a_line_per_step_and_the_loss_falls(
    run: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "PaceCheck", OneIsSlow)
    out = run("--full")
    lines = read_metrics(out)
    assert [line.get("slow_ranks") for line in lines] == [None, None, "rank 1 is slow", None]
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("fused layers: none (Liger Kernel has no") for line in said)
    stages = [line.split("] ")[1].split(":")[0] for line in said if line.startswith("[")]
    assert stages == [*STAGES, "the first step is done"]
    written = json.loads((out / START_FILE).read_text())["seconds"]
    assert list(written) == ["launch and imports", *STAGES]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["tokens"] == 63 and line["seq_len"] == 64 for line in lines)
    for name in ("grad_norm", "learning_rate", "tokens_per_second_per_device", "peak_memory_bytes"):
        assert all(line[name] > 0 for line in lines)
    assert lines[0].keys() >= {"layers_not_recomputed", "layers_offloaded", "mlp_tiles"}
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


def test_full_model_loads_without_us_and_its_config_says_nothing_of_us(
    run: Start, config_file: Path
) -> None:
    """Stock libraries load the model, whose embeddings are tied and saved once. RoPE has its older
    names too, without which transformers 4 computed with its default RoPE, silently."""
    tied = json.loads(config_file.read_text()) | {"tie_word_embeddings": True}
    config_file.write_text(json.dumps(tied))
    flags = ("--full", "--rope", "yarn", "--checkpoint", "attention")
    final = run(*flags, seq_len=256, save_every=4) / "final"
    text = (final / "config.json").read_text()
    assert "longctx" not in text
    config, yarn = json.loads(text), {"rope_type": "yarn", "factor": 4.0}
    yarn |= {"original_max_position_embeddings": 64}
    assert config["use_cache"] is True
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **yarn}
    assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, yarn)
    model = AutoModelForCausalLM.from_pretrained(final)
    before = final.parent / "checkpoint-4"
    assert (before / "config.json").read_text() == text
    checkpoint = AutoModelForCausalLM.from_pretrained(before).state_dict()
    assert all(torch.equal(weight, checkpoint[n]) for n, weight in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = AutoTokenizer.from_pretrained(final)("12 times 15 is", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=3, do_sample=False).shape[1] == 17


def test_the_loss_of_packed_rows_is_that_of_their_documents_alone(
    run: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2, with two packed rows, has the loss that transformers computes from single documents
    with the model saved after step 1. One document is longer than a row."""
    text = write_documents(tmp_path, 3, 50, 17, 150, 31, 8, 40, 2, 59)
    flags = ("--full", "--pack", "--batch-size", "2", "--save-every", "1")
    out = run(*flags, max_steps=2, text=text)
    # With an eos token each, 369 tokens: 151 of them become 64, 64 and 23.
    assert (
        "packed 9 documents into 6 rows, 96.1% full; longer than a row, so split: 1\n"
        in capsys.readouterr().out
    )
    lines = read_metrics(out)
    assert [line["packing_efficiency"] for line in lines] == [369 / (6 * 64)] * 2

    tokenizer = AutoTokenizer.from_pretrained(out / "final")
    given = [*flags_of(text=text, model="m", output="o", seq_len=64), *flags]
    data = finetune.build_data(finetune.parse_settings(given), tokenizer)
    (rows,) = data.stages[0].order.micro_batches(1, 0)
    assert all(len(row["seq_lengths"]) > 1 for row in rows)
    model = AutoModelForCausalLM.from_pretrained(out / "checkpoint-1")
    total, count = 0.0, 0
    for row in rows:
        for ids in torch.tensor(row["input_ids"]).split(row["seq_lengths"]):
            if len(ids) > 1:
                total += model(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1)
                count += len(ids) - 1
    assert lines[1]["tokens"] == count
    assert lines[1]["loss"] == pytest.approx(total / count, rel=1e-6)


def test_an_adapter_over_random_weights_loads_with_the_config_beside_it(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    final = run("--rope", "yarn", "--lora-targets", "q_proj", "v_proj", seq_len=128) / "final"
    assert not list(final.glob("model*.safetensors"))
    config, ids = AutoConfig.from_pretrained(final), torch.arange(128)[None]
    assert config.rope_parameters["rope_type"] == "yarn"
    set_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    plain = base(ids).logits
    tuned = PeftModel.from_pretrained(base, str(final))
    places = {n.split(".")[-4] for n, _ in tuned.named_parameters() if "lora_A" in n}
    assert places == {"q_proj", "v_proj"}
    assert not torch.equal(tuned(ids).logits, plain)
    monkeypatch.chdir("/")  # the card's paths hold everywhere
    assert torch.equal(lines_to_load(final)["model"](ids).logits, tuned(ids).logits)


@pytest.mark.parametrize(
    ("asked", "named", "frozen", "on_cpu", "found"),
    [
        ("auto", "bfloat16", True, False, "bfloat16"),
        ("auto", "float16", True, False, "float16"),
        ("auto", None, True, False, "float32"),
        ("auto", "bfloat16", False, False, "float32"),  # what is trained
        ("auto", "bfloat16", True, True, "float32"),
        ("float16", "bfloat16", True, True, "float16"),
    ],
)
def test_an_adapters_frozen_weights_keep_the_models_dtype(
    asked: Any, named: Any, frozen: bool, on_cpu: bool, found: str
) -> None:
    settings = settings_of(full=not frozen, dtype=asked)
    assert models.with_dtype(settings, LlamaConfig(dtype=named), on_cpu=on_cpu).dtype == found


@pytest.mark.parametrize(
    "flags",
    [
        ["--lora", "--lora-dropout", "0.2", "--gradient-accumulation-steps", "2"],
        # It goes on where a stage begins, and within one.
        ["--full", "--weight-decay", "0.1", "--stages", "64:2,16:1,32:2,64:2"],
        ["--full", "--stages", "32:4,64:3", "--pack"],
    ],
)
def test_a_resumed_run_repeats_the_whole_one_to_the_last_bit(run: Start, flags: list[str]) -> None:
    again = partial(run, *flags, "--warmup-steps", "2", "--save-every", "3", max_steps=7)
    whole, parts = again(folder="whole"), again(folder="parts")
    for late in (parts / "checkpoint-6", parts / "final"):  # as if it had stopped at 4
        shutil.rmtree(late)
    lines = (parts / "metrics.jsonl").read_text().splitlines(keepends=True)
    (parts / "metrics.jsonl").write_text("".join(lines[:4]) + '{"step": 5, "lo')
    again("--resume", folder="parts")
    assert numbers(parts) == numbers(whole)
    weights = "adapter_model.safetensors" if "--lora" in flags else "model.safetensors"
    assert (parts / "final" / weights).read_bytes() == (whole / "final" / weights).read_bytes()


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        (["--lora-targets", "q_proj", "query"], {}, "lora_targets query: .*It has down_proj"),
        ([], {"text": "nowhere/*.txt"}, r"no data at 'nowhere/\*\.txt'"),
        ([], {"seq_len": 60000, "rope": "yarn"}, "5001 tokens, less than one row"),
        ([], {"seq_len": 65}, "65 tokens.*reaches 64.*--rope yarn"),
        ([], {"model": "nobody/nothing"}, "nobody/nothing.*config.json, or set HF_HOME"),
        ([], {"tokenizer": "./nowhere"}, "--tokenizer bytes"),
        (["--ring", "2"], {}, "ring_degree=2.*1 process"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_trace(
    run: Start, flags: list[str], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run(*flags, **changes)
    assert not (tmp_path / "out").exists()


def test_a_transformers_that_makes_its_own_optimizer_is_refused(
    run: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(StepTrainer, "_prepare_for_training")
    with pytest.raises(RuntimeError, match=r"transformers 5\.\S+ has prepared its own optimizer"):
        run("--full")


def test_an_output_that_holds_files_is_refused(run: Start, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    for flags, rule in (
        ((), "holds files.*--resume"),
        (("--resume", "auto"), "no run of this rec"),
    ):
        with pytest.raises(ValueError, match=rule):
            run(*flags)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match=r"--output '.*bad\\udcff': the path has to be text"):
        run(output=tmp_path / "bad\udcff")


def test_what_is_known_without_weights_is_refused_before_they_are_read(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "build_model", lambda *_: pytest.fail("a model was built"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": NaN}\n')
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"text": tmp_path / "bad.jsonl"}, r"bad.jsonl, line 2: no JSON \(text is NaN"),
        ({"text": tmp_path}, r"the output .* lies in .*which is read as data"),
        ({"fused_layers": "liger"}, r"no kernels for device cpu\. Or use 'compile'"),
    )
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            run(**changes)
    assert not (tmp_path / "out").exists()
