"""The recipe in this process: training, saving, loading with stock libraries, resuming exactly."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, set_seed

from longctx_patch.health.pace import PaceCheck
from longctx_patch.recipes import finetune, models
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.settings import Settings
from longctx_patch.recipes.stages import START_FILE
from tests.recipes.conftest import Start, numbers, write_documents

KEYS = {
    *("step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second"),
    *("tokens_per_second_per_device", "peak_memory_bytes"),
    *("layers_not_recomputed", "layers_offloaded", "mlp_tiles", "seq_len"),
}

STAGES = ["processes", "data", "model", "weights", "rehearsal", "first step"]


class Run:
    """Starts runs of the recipe in folders of their names."""

    def __init__(self, start: Start, folder: Path) -> None:
        self._start, self.folder = start, folder

    def __call__(self, name: str, *flags: str, **changes: Any) -> Path:
        values = {"max-steps": 4, "learning-rate": 1e-2, **changes}
        pairs = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        return self._start(*pairs, *flags, folder=name)


@pytest.fixture
def run(start: Start, tmp_path: Path) -> Run:
    return Run(start, tmp_path)


class OneIsSlow(PaceCheck):
    """Knows of a slow rank after step 3, if the batches went through it."""

    def loading(self, batches: Any) -> Any:
        self.loads = True
        return super().loading(batches)

    def after_step(self, step: int) -> str:
        super().after_step(step)
        return "rank 1 is slow" if step == 3 and self.loads else ""


def test_metrics_have_a_line_per_step_and_the_loss_falls(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "PaceCheck", OneIsSlow)
    lines = read_metrics(run("out", "--full"))
    assert [line.get("slow_ranks") for line in lines] == [None, None, "rank 1 is slow", None]
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("fused layers: none (Liger Kernel has no") for line in said)
    stages = [line.split("] ")[1].split(":")[0] for line in said if line.startswith("[")]
    assert stages == [*STAGES, "the first step is done"]
    written = json.loads((tmp_path / "out" / START_FILE).read_text())["seconds"]
    assert list(written) == ["launch and imports", *STAGES]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(set(line) >= KEYS for line in lines)
    assert all(line["tokens"] == 63 and line["peak_memory_bytes"] > 0 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


def test_full_model_loads_without_us_and_its_config_says_nothing_of_us(
    run: Run, config_file: Path
) -> None:
    """Stock libraries load the model, whose embeddings are tied and saved once."""
    tied = json.loads(config_file.read_text()) | {"tie_word_embeddings": True}
    config_file.write_text(json.dumps(tied))
    flags = ("--full", "--rope", "yarn", "--checkpoint", "attention")
    final = run("out", *flags, **{"seq-len": 256, "save-every": 4}) / "final"
    text = (final / "config.json").read_text()
    assert "longctx" not in text
    assert json.loads(text)["use_cache"] is True
    assert json.loads(text)["rope_parameters"]["factor"] == 4.0
    model = AutoModelForCausalLM.from_pretrained(final)
    checkpoint = AutoModelForCausalLM.from_pretrained(
        final.parent / "checkpoints/step_000004/model"
    )
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, checkpoint.state_dict()[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = AutoTokenizer.from_pretrained(final)("12 times 15 is", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=3, do_sample=False).shape[1] == 17


def test_the_loss_of_packed_rows_is_that_of_their_documents_alone(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2, with two packed rows, has the loss that transformers computes from single documents
    with the model saved after step 1. One document is longer than a row."""
    text = write_documents(tmp_path, 3, 50, 17, 150, 31, 8, 40, 2, 59)
    flags = ("--full", "--pack", "--batch-size", "2", "--save-every", "1")
    out = run("out", *flags, **{"max-steps": 2, "text": text})
    # With an eos token each, 369 tokens: 151 of them become 64, 64 and 23.
    assert (
        "packed 9 documents into 6 rows, 96.1% full; longer than a row, so split: 1\n"
        in capsys.readouterr().out
    )
    lines = read_metrics(out)
    assert [line["packing_efficiency"] for line in lines] == [369 / (6 * 64)] * 2

    tokenizer = AutoTokenizer.from_pretrained(out / "final")
    arguments = [f"--text={text}", "--model=m", "--output=o", "--seq-len=64", *flags]
    data = finetune.build_data(finetune.parse_settings(arguments), tokenizer)
    (rows,) = data.stages[0].order.micro_batches(1, 0)
    assert all(len(row["seq_lengths"]) > 1 for row in rows)
    model = AutoModelForCausalLM.from_pretrained(out / "checkpoints/step_000001/model")
    total, count = 0.0, 0
    for row in rows:
        for ids in torch.tensor(row["input_ids"]).split(row["seq_lengths"]):
            if len(ids) > 1:
                total += model(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1)
                count += len(ids) - 1
    assert lines[1]["tokens"] == count
    assert lines[1]["loss"] == pytest.approx(total / count, rel=1e-6)


def test_adapter_loads_with_peft_and_the_config_beside_it(
    run: Run, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = run("out", "--rope", "yarn", "--lora-targets", "q_proj", "v_proj", **{"seq-len": 128})
    final = out / "final"
    config = AutoConfig.from_pretrained(final)
    assert config.rope_parameters["rope_type"] == "yarn"
    set_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    plain = base(torch.arange(128)[None]).logits
    tuned = PeftModel.from_pretrained(base, str(final))
    assert {n.split(".")[-4] for n, _ in tuned.named_parameters() if "lora_A" in n} == {
        "q_proj",
        "v_proj",
    }
    assert not torch.equal(tuned(torch.arange(128)[None]).logits, plain)
    snippet = "\n".join(re.findall("^    (.*)$", (final / "README.md").read_text(), re.MULTILINE))
    monkeypatch.chdir("/")  # its paths hold everywhere
    names: dict[str, Any] = {}
    exec(snippet, names)
    ids = torch.arange(128)[None]
    assert torch.equal(names["model"](ids).logits, tuned(ids).logits)
    assert not list(final.glob("model*.safetensors"))


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
    settings = Settings(
        model="m", text=["t"], output="out", seq_len=64, full=not frozen, dtype=asked
    )
    config = LlamaConfig(dtype=named)
    assert models.with_dtype(settings, config, on_cpu=on_cpu).dtype == found


@pytest.mark.parametrize(
    "flags",
    [
        ["--full", "--weight-decay", "0.1"],
        ["--lora", "--lora-dropout", "0.2", "--gradient-accumulation-steps", "2"],
        ["--full", "--stages", "64:2,16:1,32:2,64:2"],  # goes on where a stage begins
        ["--full", "--stages", "32:4,64:3", "--pack"],  # and within one
    ],
)
def test_a_resumed_run_repeats_the_whole_one_to_the_last_bit(run: Run, flags: list[str]) -> None:
    common = [*flags, "--warmup-steps", "2", "--save-every", "3"]
    whole = run("whole", *common, **{"max-steps": 7})
    parts = run("parts", *common, **{"max-steps": 7})
    for late in (parts / "checkpoints/step_000006", parts / "final"):  # as if it had stopped at 4
        for path in sorted(late.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    lines = (parts / "metrics.jsonl").read_text().splitlines(keepends=True)
    (parts / "metrics.jsonl").write_text("".join(lines[:4]) + '{"step": 5, "lo')
    run("parts", *common, "--resume", **{"max-steps": 7})
    assert numbers(parts) == numbers(whole)
    weights = "adapter_model.safetensors" if "--lora" in flags else "model.safetensors"
    assert (parts / "final" / weights).read_bytes() == (whole / "final" / weights).read_bytes()


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        (["--lora-targets", "q_proj", "query"], {}, "lora_targets query: .*It has down_proj"),
        ([], {"text": "nowhere/*.txt"}, r"no data at 'nowhere/\*\.txt'"),
        ([], {"seq-len": 60000, "rope": "yarn"}, "5001 tokens, less than one row"),
        ([], {"seq-len": 65}, "65 tokens.*reaches 64.*--rope yarn"),
        ([], {"model": "nobody/nothing"}, "nobody/nothing.*config.json, or set HF_HOME"),
        ([], {"tokenizer": "./nowhere"}, "--tokenizer bytes"),
        (["--ring", "2"], {}, "ring_degree=2.*1 process"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_trace(
    run: Run,
    flags: list[str],
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no waiting for a hub
    with pytest.raises(ValueError, match=message):
        run("out", *flags, **changes)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files.*--resume"):
        run("out", *flags, **changes)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_bad_data_is_refused_before_weights_are_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "build_model", lambda *_: pytest.fail("a model was built"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": NaN}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: no JSON \(text is NaN"):
        run("out", text=tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match=r"the output .* lies in .*which is read as data"):
        run("out", text=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_an_eos_token_is_refused(run: Run, tmp_path: Path) -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match=r'no eos token.*tokenizer_config.json \("eos_token"'):
        run("out", tokenizer=tmp_path / "words")


def test_layers_that_cannot_be_fused_here_are_refused_before_a_model_is_built(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "build_model", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(ValueError, match=r"no kernels for device cpu\. Or use 'compile'"):
        run("out", "--fused-layers", "liger")
    assert not (run.folder / "out").exists()
