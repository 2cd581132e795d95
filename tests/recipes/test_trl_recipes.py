"""Recipes over TRL, from the command line alone: two processes train as one does, evaluate, keep
the best, and go on where they stopped."""

import json
import re
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, set_seed

from longctx_patch.recipes import dpo, sft, trl_run
from longctx_patch.recipes.callbacks import StopCallback
from longctx_patch.recipes.metrics import read_metrics
from tests.health.flaw import Flaw
from tests.launching import run_longctx
from tests.plugin.launched import run_in_turn, run_launched
from tests.recipes.conftest import flags_of
from tests.recipes.data.test_reading import NO_MARKS
from tests.recipes.test_model_card import Hub
from tests.recipes.trl_jobs import make_job, patch

COMPARED = re.compile(
    r"loss|grad_norm|learning_rate|eval_loss|num_tokens|mean_token_accuracy|rewards"
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return make_job(tmp_path)


def of_run(job: Path, recipe: str = "sft", **values: Any) -> list[str]:
    """The arguments of a run in the folder that `patch` has written."""
    return ["--config", str(job / "run" / f"{recipe}.yaml"), *flags_of(**values)]


def agree(folder: Path, other: Path, *, compared: re.Pattern[str] = COMPARED) -> None:
    """Two runs have logged the same."""
    found, wanted = read_metrics(folder), read_metrics(other)
    assert len(found) == len(wanted) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        names = [name for name in theirs if compared.search(name)]
        assert names
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


@pytest.mark.timeout(600)
def test_a_chat_job_of_three_epochs(job: Path) -> None:
    """From `longctx patch` to an adapter that plain PEFT loads: the best by evaluation. Its
    tokenizer has the chat template that was given, which marks no turns."""
    template = job / "other.jinja"
    template.write_text(NO_MARKS)
    data = ["--data", str(job / "chats.jsonl"), "--eval-data", str(job / "held_out.jsonl")]
    said = patch(job, *data, "--chat-template", str(template), "--context", "128")
    command = said.strip().splitlines()[-1].split()
    assert command[:2] == ["longctx", "train"]
    more = flags_of(num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch")
    more += flags_of(learning_rate=0.5, gradient_accumulation_steps=2, optim="sgd")
    more += flags_of(lr_scheduler_type="constant", disable_tqdm=1, report_to="tensorboard")
    more += flags_of(early_stopping=5, metric_for_best_model="eval_loss")
    more += flags_of(greater_is_better=1)  # so that the best is not the last
    code, printed = run_longctx(job / "said", *command[1:], *more)
    assert code == 0, printed
    training = job / "run" / "training"
    run_launched(sft.main, 1, [*of_run(job, ulysses=1, output_dir=job / "one"), *more])
    agree(training, job / "one")

    found = read_metrics(training)
    evaluated = {int(line["step"]): line["eval_loss"] for line in found if "eval_loss" in line}
    assert sorted(evaluated) == [6, 12, 18]
    tracked = scalars(training)
    for tag, wanted in (("train/loss", "loss"), ("eval/loss", "eval_loss")):
        values = {int(line["step"]): line[wanted] for line in found if wanted in line}
        assert tracked[tag] == pytest.approx(values, rel=1e-6)
    best = max(evaluated, key=lambda step: evaluated[step])
    assert best != 18
    adapter = load_file(training / "final" / "adapter_model.safetensors")
    kept = load_file(training / f"checkpoint-{best}" / "adapter_model.safetensors")
    assert adapter.keys() == kept.keys()
    assert all(torch.equal(adapter[name], kept[name]) for name in adapter)

    set_seed(0)
    final = training / "final"
    # A longer RoPE, under both of its names, comes with a checkpoint's adapter too.
    saved = (training / f"checkpoint-{best}" / "config.json").read_text()
    assert saved == (final / "config.json").read_text()
    config = AutoConfig.from_pretrained(final)
    assert config.max_position_embeddings == 128  # --context, of rows of 96 tokens
    base = AutoModelForCausalLM.from_config(config)
    PeftModel.from_pretrained(base, str(final))
    assert (final / "chat_template.jinja").read_text() == NO_MARKS


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of a run: values of each tag by their steps."""
    (file,) = folder.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file)).Reload()
    tags = events.Tags()["scalars"]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


@pytest.mark.timeout(600)
def test_a_preference_job(job: Path) -> None:
    """The reference is the model with its adapter off, or a second copy of all weights."""
    patch(job, "--data", str(job / "pairs.jsonl"), "--dpo")
    usual = of_run(job, "dpo", max_steps=3, learning_rate=0.1)
    ways = {"adapter": [], "full": ["--full", "--optim", "sgd"]}
    for ranks in (2, 1):
        given = (
            [*usual, *more, *flags_of(ulysses=ranks, output_dir=job / f"{name}_{ranks}")]
            for name, more in ways.items()
        )
        run_in_turn(ranks, *((dpo.main, [words]) for words in given))
    for name in ways:
        agree(job / f"{name}_2", job / f"{name}_1")
        # TRL's second adapter, the one before training, is not saved with the trained one.
        assert not [path for path in (job / f"{name}_2/final").iterdir() if path.is_dir()]


def train_with_flaw(arguments: list[str], step: int) -> None:
    load = trl_run.load

    def flawed(*given: Any, **more: Any) -> Any:
        model = load(*given, **more)
        Flaw(model, "base_model.model.model.layers.1.mlp", {step})
        return model

    with mock.patch.object(trl_run, "load", flawed):
        sft.main(arguments)


@pytest.mark.timeout(600)
def test_a_skipped_step_has_its_line(job: Path) -> None:
    patch(job, "--data", str(job / "texts.jsonl"), "--sft")
    usual = of_run(job, max_steps=4, logging_steps=1, skip_bad_steps=1, sentinel_every=2)
    run_launched(train_with_flaw, 2, usual, 3)
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (job / "run" / "training" / "metrics.jsonl").read_text().splitlines()
    ]
    (skipped,) = [line for line in lines if "skipped" in line]
    assert (skipped["step"], skipped["loss"]) == (3, None)
    assert "layers.1.mlp (" in skipped["skipped"]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 3, 4]
    looked = {line["step"]: line["sentinel_error"] for line in lines if "sentinel_error" in line}
    assert list(looked) == [2, 4]
    assert max(looked.values()) < 1e-5


@pytest.mark.timeout(600)
def test_a_run_goes_on_where_it_stopped(job: Path) -> None:
    """Packed texts, held out in part: the steps after the checkpoint are those of the whole run."""
    patch(job, "--data", str(job / "texts.jsonl"), "--sft", "--pack")
    usual = of_run(job, max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2)
    usual += flags_of(eval_share=0.3, output_dir=job / "whole")
    logged = [*usual, *flags_of(save_steps=100, resume="auto", save_total_limit=1)]
    logged += flags_of(logging_first_step=1, logging_steps=3)
    command = [*logged, "--output-dir", str(job / "logged_in_parts")]
    _, wanted, codes = run_in_turn(
        2,
        (sft.main, [usual]),
        (ended, [[*logged, "--output-dir", str(job / "logged")]]),
        (stopped_by_a_signal, [command]),
    )
    assert codes == [138, 138]
    check_stop(job / "logged_in_parts")
    whole = read_metrics(job / "whole")
    last = job / "whole" / "checkpoint-4"
    last.rename(job / "elsewhere")
    _, found = run_in_turn(2, (sft.main, [[*usual, "--resume"]]), (ended, [command]))
    assert found == wanted
    check_ends(job / "logged", job / "logged_in_parts")
    again = read_metrics(job / "whole")
    names = ("step", "loss", "eval_loss", "grad_norm")
    assert [[line.get(n) for n in names] for line in again] == [
        [line.get(n) for n in names] for line in whole
    ]
    weights = [
        load_file(folder / "adapter_model.safetensors") for folder in (last, job / "elsewhere")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    check_what_is_refused(job, usual)


def stopped_by_a_signal(arguments: list[str]) -> int:
    """The recipe's exit code, where rank 1 alone gets a signal in step 2."""
    begin = StopCallback.on_step_begin

    def signalled(self: StopCallback, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 1 and args.process_index == 1:
            signal.raise_signal(signal.SIGUSR1)
        begin(self, args, state, control, **more)

    with mock.patch.object(StopCallback, "on_step_begin", signalled):
        try:
            sft.main(arguments)
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def ended(arguments: list[str]) -> tuple[float, float]:
    """`train_loss` as it is logged and as `train` returns it."""
    returned: list[Any] = []
    train = sft.LongContextSFTTrainer.train

    def kept(*given: Any, **more: Any) -> Any:
        returned.append(train(*given, **more))
        return returned[-1]

    with mock.patch.object(sft.LongContextSFTTrainer, "train", kept):
        trainer = trl_run.run(sft.METHOD, arguments)
    return trainer.state.log_history[-1]["train_loss"], returned[0].training_loss


def check_stop(parts: Path) -> None:
    """A run that a signal stopped between two logs has saved the step."""
    assert [path.name for path in parts.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (parts / "final").exists()


def check_ends(whole: Path, parts: Path) -> None:
    """It has gone on to the same weights. Its means, tokens and the loss at its end, which were
    counted from the resumption, are those of the whole run."""
    assert [path.name for path in parts.glob("checkpoint-*")] == ["checkpoint-4"]
    ours, theirs = (load_file(f / "final/adapter_model.safetensors") for f in (parts, whole))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    mine, lines = ([e for e in read_metrics(f) if "loss" in e] for f in (parts, whole))
    names = {n for n in lines[1] if not re.search("second|memory|runtime", n)}
    assert {"loss", "num_tokens", "mean_token_accuracy"} <= names
    assert [line["step"] for line in lines] == [1, 3]
    assert [[e[n] for n in names] for e in mine] == [[e[n] for n in names] for e in lines]


def refusal(arguments: list[str]) -> str:
    with pytest.raises(ValueError) as refused:
        sft.main(arguments)
    return str(refused.value)


def check_what_is_refused(job: Path, usual: list[str]) -> None:
    """A flipped bit is named and the checkpoint before taken; another rate or text is refused."""
    output = job / "whole"
    path = output / "checkpoint-4" / "rng_state_1.pth"
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    texts = job / "texts.jsonl"
    texts.write_text(texts.read_text().replace("w1 ", "w2 "), encoding="utf-8")
    others = {"learning_rate": ["--learning-rate", "0.25", "--allow-change", "rows"], "rows": []}
    said = run_in_turn(2, *((refusal, [[*usual, "--resume", *more]]) for more in others.values()))
    for name, by_rank in zip(others, said, strict=True):
        assert all(f"--allow-change {name}." in text for text in by_rank)
    assert (output / "checkpoint-4.damaged").is_dir()
    assert [path.name for path in output.glob("checkpoint-*")] != []
    assert not list(output.glob(".lock"))


def train_and_push(arguments: list[str]) -> list[tuple[str, ...]]:
    """What a run asks the hub for; Trainer's own uploads of its checkpoints are left out."""
    fake = Hub()
    with (
        mock.patch.object(huggingface_hub, "HfApi", fake),
        mock.patch.object(Trainer, "init_hf_repo"),
        mock.patch.object(Trainer, "_push_from_checkpoint"),
    ):
        sft.main(arguments)
    return fake.calls


def test_the_trained_model_is_uploaded(job: Path) -> None:
    patch(job, "--data", str(job / "chats.jsonl"))
    push = flags_of(push_to_hub=1, hub_model_id="me/model", hub_private_repo=1)
    (calls,) = run_launched(train_and_push, 1, [*of_run(job, max_steps=1, ulysses=1), *push])
    final = job / "run" / "training" / "final"
    files = sorted(path.name for path in final.iterdir())
    assert calls[0] == ("create_repo", "me/model", "True", "True")
    assert calls[-1] == ("upload_folder", "me/model", *files)
    assert {"README.md", "adapter_model.safetensors", "config.json"} <= set(files)
    assert 'AutoConfig.from_pretrained("me/model")' in (final / "README.md").read_text()


@pytest.mark.timeout(600)
def test_a_stream_trains_as_a_table_in_its_order(job: Path) -> None:
    patch(job, "--data", str(job / "chats.jsonl"))
    usual = of_run(job, max_steps=3, optim="sgd")
    stream = [*usual, "--streaming", *flags_of(output_dir=job / "stream", save_steps=1)]
    stream += flags_of(save_total_limit=1, keep_every=2)
    run_launched(sft.main, 2, stream)
    saved = sorted(path.name for path in (job / "stream").glob("checkpoint-*"))
    assert saved == ["checkpoint-2", "checkpoint-3"]
    table = flags_of(train_sampling_strategy="sequential", shuffle_dataset=0)
    run_launched(sft.main, 1, [*usual, *table, *flags_of(ulysses=1, output_dir=job / "table")])
    agree(job / "stream", job / "table")
    check_that_other_data_is_refused(job / "chats.jsonl", stream)


def check_that_other_data_is_refused(chats: Path, stream: list[str]) -> None:
    """A stream goes on with the data that it began with. Others were trained on in silence."""
    before = [line["loss"] for line in read_metrics(chats.parent / "stream")]
    checkpoint = chats.parent / "stream" / "checkpoint-3"
    checkpoint.rename(chats.parent / "later")
    run_launched(sft.main, 2, [*stream, "--resume"])
    assert [line["loss"] for line in read_metrics(chats.parent / "stream")] == before
    text = chats.read_text()
    chats.write_text(text.replace("w1 ", "w2 "), encoding="utf-8")
    assert len(chats.read_text()) == len(text)
    said, _ = run_in_turn(
        2,
        (refusal, [[*stream, "--resume"]]),
        (sft.main, [[*stream, "--resume", "--allow-change", "files"]]),
    )
    for text in said:
        assert "files.chats.jsonl is '" in text
        assert "--allow-change files." in text
