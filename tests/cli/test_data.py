"""`longctx data` shows the rows that a run trains on."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from trl import SFTConfig, SFTTrainer

from longctx_patch.checkpoints.lock import held
from longctx_patch.cli import verify
from longctx_patch.cli.main import main as longctx
from longctx_patch.cli.row_text import braced, shown
from longctx_patch.cli.run_data import data_of_run
from longctx_patch.data import pack_rows
from longctx_patch.recipes.next_step import ending, next_of
from longctx_patch.recipes.run_record import mark_ended, write_record
from longctx_patch.recipes.trl_data import tables_of_run
from tests.hf.tiny import featured_model
from tests.recipes.conftest import write_records as write
from tests.recipes.data.test_reading import CHAT, words
from tests.recipes.trl_jobs import invoke, make_job, patch
from tests.trl.cases import rows

# Of TRL\'s own defaults.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
GREEN = r"\x1b\[32m(.*?)\x1b\[0m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return make_job(tmp_path)


def data(*words: str) -> Result:
    return CliRunner().invoke(longctx, ["data", *words], color=True)


def change(file: Path, **values: Any) -> None:
    """Set other values in a settings file."""
    text = file.read_text()
    for name, value in values.items():
        text, found = re.subn(rf"^{name}:.*$", f"{name}: {value}", text, flags=re.M)
        assert found == 1
    file.write_text(text)


def test_what_a_chat_run_will_see(job: Path) -> None:
    patch(job, "--data", str(job / "chats.jsonl"), "--eval-data", str(job / "held_out.jsonl"))
    found = data(str(job / "run"), "--color", "--rows", "12")
    assert found.exit_code == 0, found.output
    chats = rows("chat", 12, 1)
    answers = [m["content"] for c in chats for m in c["messages"] if m["role"] == "assistant"]
    num_learned = sum(len(answer.split()) + 1 for answer in answers)
    assert re.search(rf"rows +12 .*learned +{num_learned} ", found.output.replace("\n", " "))
    green = re.findall(GREEN, found.output)
    assert sorted(green) == sorted(f"{answer} <eos>" for answer in answers)
    assert f"Next: longctx train {job}/run\n" in found.output
    plain = data(str(job / "run" / "sft.yaml"), "--rows", "12").output  # of no terminal
    assert "\x1b" not in plain
    assert re.findall(r"\{\+(.*?)\+\}", plain) == green
    assert "\nrow " not in data(str(job / "run" / "sft.yaml"), "--rows", "0").output
    change(job / "run" / "sft.yaml", max_eval_samples=2)
    held_out = rows("chat", 3, 2)
    assert len(tables_of_run(job / "run" / "sft.yaml").evaluation) == 2 < len(held_out)


def test_a_chat_template_without_marks(job: Path) -> None:
    """The run folder keeps the file, learns as much as with marks, and says how it was found."""
    file = job / "other.jinja"
    file.write_text(CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    options = ["--data", str(job / "chats.jsonl"), "--chat-template", str(file)]
    patch(job, *options)
    file.unlink()
    found = data(str(job / "run"), "--no-color").output
    kept = job / "run" / "chat_template.jinja"
    assert "add_generation_prompt" in kept.read_text()
    assert f"chat_template: {kept}\n" in (job / "run" / "sft.yaml").read_text()
    marked = data_of_run(job / "run" / "sft.yaml").facts["train"][1][:2]
    assert re.search(r"learned .*, the template marks none: .* found by rendering parts", found)
    change(job / "run" / "sft.yaml", chat_template="''")
    assert data_of_run(job / "run" / "sft.yaml").facts["train"][1][:2] == marked


def test_what_vanishes_is_said_and_refused(job: Path) -> None:
    """By all that see the data: of chats whose answers are beyond the cut, with counts, reason and
    the first lines; a run starts without them only if it is told to."""
    ask = {"role": "user", "content": " ".join(["w1"] * 90)}
    answer = {"role": "assistant", "content": "w2 w3"}
    chats = [{"messages": [*([ask] * (n % 7 < 6)), answer]} for n in range(40)]
    write(job / "cut.jsonl", chats)
    options = ["--data", str(job / "cut.jsonl"), "--too-long", "cut", "--train-on", "assistant"]
    said = patch(job, *options, "--seq-len", "80")
    assert "Of the first 20 records of the data:\nleft out 18 of 20 records (" in said
    assert "The run is refused if all its records are like these. A run leaves" in said
    why = "nothing is learned in their first 80 tokens (too_long: cut); first: "
    why += "; ".join(f"{job}/cut.jsonl, line {line}" for line in (1, 2, 3))
    assert why in said
    refused = data(str(job / "run"), "--no-color")
    assert refused.exit_code == 1
    found = refused.output
    assert re.search(r"left out +35 +of 40 records \(", found)
    assert "The run will be refused: 35 of 40 records (87.5%) would be left out" in found
    run = tables_of_run(job / "run" / "sft.yaml")
    lines = list[str]()
    with pytest.raises(ValueError, match=r"train data: 35 of 40 records.*--allow-dropped"):
        run.say_losses(lines.append)
    assert lines == [line for line in lines if line.startswith("train data: left out 35 of 40 ")]
    assert lines
    change(job / "run" / "sft.yaml", allow_dropped="true")
    tables_of_run(job / "run" / "sft.yaml").say_losses(lines.append)
    assert "will be refused" not in data(str(job / "run")).output


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_packed_rows_are_those_of_the_trainer(job: Path, strategy: str) -> None:
    patch(job, "--data", str(job / "texts.jsonl"), "--sft", "--pack")
    settings = job / "run" / "sft.yaml"
    change(settings, seq_len=40, rope="none", too_long="cut")
    settings.write_text(settings.read_text() + f"packing_strategy: {strategy}\n")
    run = tables_of_run(settings)
    trainer = SFTTrainer(
        model=featured_model("llama"),
        args=SFTConfig(
            str(job / "out"),
            use_cpu=True,
            bf16=False,
            max_length=40,
            report_to=[],
            packing=True,
            packing_strategy=strategy,
            seed=run.args.seed,
        ),
        train_dataset=run.train,
        processing_class=run.reading.tokenizer,
    )
    seen = data_of_run(settings).rows
    wanted = [str(row) for row in trainer.train_dataset]
    assert len(wanted) > 1
    assert sorted(str(row) for row in seen) == sorted(wanted)  # the trainer shuffles them again

    found = data(str(job / "run"), "--rows", str(len(seen)), "--color")
    tokens = sum(len(row["input_ids"]) for row in seen)
    full = tokens / (len(seen) * 40)
    assert re.search(rf"packed +{len(seen)} +rows, {full:.1%} full", found.output)
    assert found.output.count("\nrow ") == len(seen)
    counts = [len(row.get("seq_lengths", [1])) for row in seen]
    assert found.output.count("-- document ") == sum(count for count in counts if count > 1)


@pytest.mark.parametrize("held_out", ["0.0", "0.25"])
def test_shares_of_a_mixture(job: Path, held_out: str) -> None:
    """By tokens, as they were asked for; a small source is drawn again. Also of sources that are
    joined, of which each row comes once."""
    many = write(job / "many.jsonl", [{"text": " ".join(["w1"] * 5)}] * 300)
    few = write(job / "few.jsonl", [{"text": " ".join(["w2"] * 17)}] * 7)
    patch(job, "--data", str(many), "--data", str(few), "--sft")
    settings = job / "run" / "sft.yaml"
    plain = settings.read_text() + f"eval_share: {held_out}\n"
    settings.write_text(plain.replace("data_shares: []", "data_shares: [3, 1]"))
    said = data(str(job / "run"), "--no-color").output
    shares = [float(each) for each in re.findall(r"([\d.]+)% +of the tokens, ", said)]
    assert sum(shares) == pytest.approx(100, abs=0.11)
    train = tables_of_run(settings).train
    tokens = [0, 0]
    for row in train:
        tokens[words_of("w2")[0] in row["input_ids"]] += len(row["input_ids"])
    assert shares == [round(100 * each / sum(tokens), 1) for each in tokens]
    counts = [sum(token in row["input_ids"] for row in train) for token in words_of("w1", "w2")]
    for file, count, size in ((many, counts[0], 300), (few, counts[1], 7)):
        warned = r" \(WARNING: what is read more than 4 times.*" if count > 4 * size else ""
        wanted = rf"{file} .*rows {count / size:.2f} times each of its {size}{warned}\n"
        assert re.search(wanted, said)
    settings.write_text(plain)
    said = data(str(job / "run"), "--no-color").output
    if held_out == "0.0":
        assert f"of the tokens, {300 * 6:,}; rows 1.00 times each of its 300" in said
        assert "of the tokens, 126; rows 1.00 times each of its 7\n" in said


def test_a_mixture_of_long_and_short_documents(job: Path) -> None:
    """What `longctx data` says of it, and that it is one of plain text."""
    texts = [{"text": " ".join(["w1"] * number)} for number in (120, 250, *range(3, 40))]
    source = f"--data={write(job / 'texts.jsonl', texts)}"
    found = invoke(job, source, "--mixture", "olmo3")
    assert "documents are long from 8,192 tokens, and a row holds 96" in found.output
    found = invoke(job, f"--data={job}/chats.jsonl", "--mixture", "prolong")
    assert "--mixture prolong with the recipe sft" in found.output
    said = patch(job, source, "--mixture", "prolong")
    assert re.search(r"mixture +long 60%, short 40% .*long from 96 \(ProLong, arXiv", said)
    said = data(str(job / "run"), "--no-color").output
    names = (r"long \(2 documents of 96 tokens or more\)", r"short \(37 documents, 2 rests of .*\)")
    shares = [re.search(rf"{name} +([\d.]+)% +of the tokens, ", said) for name in names]
    assert [float(each[1]) for each in shares if each] == pytest.approx([60, 40], abs=5)


def test_stages_of_growing_rows(job: Path) -> None:
    """Each stage's rows, by the rule that steps have about as many tokens."""
    source = f"--data={job}/texts.jsonl"
    found = invoke(job, source, "--seq-len", "96", "--stages", "32:3,64:2")
    assert "seq_len=96 with stages='32:3,64:2', which say it: the longest rows have 64" in (
        " ".join(found.output.split())
    )
    found = invoke(job, f"--data={job}/pairs.jsonl", "--dpo", "--stages", "32:3,96:2")
    assert "--stages 32:3,96:2 with the recipe dpo: it is for plain text" in found.output
    said = patch(job, source, "--stages", "32:3,96:2")
    assert "steps 1 to 3: rows of 32 tokens; steps 4 to 5: rows of 96 tokens" in said
    assert "gradient_accumulation_steps 3, 1" in said
    found = data(str(job / "run"), "--no-color", "--rows", "1")
    counts = [
        re.search(rf"train, {stage}:\n.*\n +rows +([\d,]+) ", found.output)
        for stage in ("steps 1 to 3: rows of 32 tokens", "steps 4 to 5: rows of 96 tokens")
    ]
    tokens = sum(len(row["text"].split()) + 1 for row in rows("text", 8, 4))
    assert [int(count[1]) for count in counts if count] == [tokens // 32, tokens // 96]


def words_of(*names: str) -> list[int]:
    return [words().convert_tokens_to_ids(name) for name in names]


def test_pairs(job: Path) -> None:
    """Three of them without a preference."""
    pairs = rows("pairs", 8, 3)
    for pair in pairs[2:5]:
        pair["rejected"] = pair["chosen"]
    patch(job, "--data", str(write(job / "ties.jsonl", pairs)), "--dpo")
    found = data(str(job / "run"), "--rows", "1", "--no-color")
    (place,) = re.findall(r"row (\d)", found.output)
    shown_pair: dict[str, Any] = pairs[int(place)]
    wanted = f"{shown_pair['prompt']}\nchosen: {shown_pair['chosen'].strip()} <eos>\nrejected: "
    assert wanted in found.output
    assert re.search(r"no preference +3 +pairs of equal answers teach nothing", found.output)


def test_what_comes_next_is_what_the_run_has_not_done_yet(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`longctx verify` and `longctx data` said `longctx train` of a run that had ended, too."""
    patch(job, "--data", str(job / "texts.jsonl"))
    run, output, final = (job / "run" / part for part in ("", "training", "training/final"))
    file = run / "finetune.yaml"
    assert next_of(file) == f"Next: longctx train {run}"
    assert next_of(run / "another.yaml") == ""
    plan = {"start": f"accelerate launch {run.resolve()} ..."}  # of several machines
    (run / "plan.json").write_text(json.dumps(plan))
    assert next_of(file) == f"Next: {plan['start']}"
    (run / "plan.json").write_text(json.dumps({"start": "longctx train /elsewhere"}))
    assert next_of(file) == f"Next: longctx train {run}"
    write_record(output, {}, 2)
    assert next_of(file) == f"Next: longctx train {run} --resume auto"
    with held(output, launched=0, say=print):
        assert next_of(file) == f"Next: longctx report {run}"
    final.mkdir()
    mark_ended(output, {})
    use = f"Next: longctx eval {run} (does it use its context?), then longctx report {run}"
    assert f"{use}\n" in data(str(run)).output
    monkeypatch.setattr(verify, "run", lambda *_: SimpleNamespace(ok=True))
    monkeypatch.setattr(verify, "render", lambda *_: "")
    assert f"{use}\n" in CliRunner().invoke(longctx, ["verify", str(run)]).output
    adapter = final / "adapter_config.json"
    adapter.write_text('{"base_model_name_or_path": "hub/name"}')
    assert next_of(file) == f"{use}, then longctx merge {final}"
    (output / "merged").mkdir()
    assert next_of(file) == use
    adapter.write_text('{"base_model_name_or_path": "model/config.json"}')  # random weights
    assert next_of(file) == f"Next: longctx report {run}"
    assert ending(final).endswith(next_of(file))
    again = run / "again"  # not the folder that `longctx eval RUN` looks at
    assert ending(again / "final").endswith(f"then longctx report {again}")


def test_what_a_run_on_plain_text_will_see(job: Path) -> None:
    """Joined, with a rest that fills no row; and packed, as the recipe packs them."""
    said = patch(job, "--data", str(job / "texts.jsonl"))
    assert f"longctx data {job}/run" in said
    change(job / "run" / "finetune.yaml", seq_len=40, rope="none")
    found = data(str(job / "run"))
    assert found.exit_code == 0, found.output
    lengths = [len(text["text"].split()) + 1 for text in rows("text", 8, 4)]
    full, rest = divmod(sum(lengths), 40)
    flat = " ".join(found.output.split())
    assert f"documents 8 {sum(lengths)} tokens rows {full} {full * 40} tokens, 100.0% full" in flat
    assert f"learned {full * 39} 97.5% of the tokens left out {rest} tokens" in flat
    assert f"Next: longctx train {job}/run\n" in found.output

    change(job / "run" / "finetune.yaml", pack="true", seq_len=max(lengths) - 1)
    found = data(str(job / "run"), "--rows", "99", "--color")
    documents = [{"input_ids": [0] * length} for length in lengths]
    packed = pack_rows(documents, max(lengths) - 1, too_long="split")
    wanted = [
        f"-- document {number}, {length} tokens"
        for row in packed
        for number, length in enumerate(row["seq_lengths"], start=1)
        if len(row["seq_lengths"]) > 1
    ]
    assert wanted
    assert re.findall(r"-- document .*", found.output) == wanted
    assert f"{packed.efficiency:.1%} full" in found.output
    assert packed.num_split
    assert f"split {packed.num_split} documents longer" in " ".join(found.output.split())
    green = sum(len(text.split()) for text in re.findall(GREEN, found.output))
    assert green == sum(lengths) - packed.num_documents  # all but the first of each


def test_long_rows_are_shown_in_part(job: Path) -> None:
    texts = [{"text": " ".join(["w1"] * number)} for number in [3000, *[20] * 30]]
    patch(job, "--data", str(write(job / "long.jsonl", texts)))
    change(job / "run" / "finetune.yaml", seq_len=3001, pack="true")
    found = data(str(job / "run"), "--no-color")
    assert "row 0:\nw1" in found.output
    assert "... 2,201 tokens left out ..." in found.output
    assert "row 1, 630 tokens of 30 documents:\n-- document 1, 21 tokens\nw1" in found.output
    assert found.output.rstrip().endswith("-- 22 more documents")


def test_control_characters_are_shown_by_their_codes() -> None:
    """In a document, and in a pair: they would change the terminal."""
    text = "\x1b[2J\r\x9b\u202ea\tb\nc"
    plain = list(shown([{"input_ids": [1, 2]}], lambda _: text, 1, 0, braced))
    pairs = {name: [1] for name in ("prompt_ids", "chosen_ids", "rejected_ids")}
    pair = list(shown([pairs], lambda _: text, 1, 0, braced))
    for found in (plain, pair):
        assert r"\x1b[2J\r\x9b\u202ea" + "\tb\nc" in click.unstyle(found[0])
        assert not re.search(r"\x1b\[2J|[\r\x9b\u202e]", found[0])


def test_what_can_not_be_shown(job: Path) -> None:
    (job / "empty").mkdir()
    found = data(str(job / "empty"))
    assert found.exit_code == 1
    assert "has no finetune.yaml or sft.yaml or dpo.yaml: give a run folder" in found.output
    chats = write(job / "more.jsonl", [*rows("chat", 30, 1), {"text": "w1"}])
    patch(job, "--data", str(chats))
    found = data(str(job / "run"))
    assert found.exit_code == 1
    assert "more.jsonl, line 31: a record with a field of text, among those with" in found.output
    texts = write(job / "texts.jsonl", [*[{"text": "w1"}] * 30, {"other": "w1"}])
    (job / "run").rename(job / "before")
    patch(job, "--data", str(texts))
    found = data(str(job / "run"))
    assert found.exit_code == 1
    assert "texts.jsonl, line 31: no text in field 'text', there is: other" in found.output
