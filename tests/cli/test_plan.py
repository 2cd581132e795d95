"""`longctx plan`: what it prints, writes and refuses."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from longctx_patch.cli.arguments import Tokens
from longctx_patch.cli.plan import KINDS
from longctx_patch.planner.machines import MACHINES
from tests.cli.conftest import Run
from tests.hf.seeing import seeing_config
from tests.planner.jobs import LLAMA_8B

WriteConfig = Callable[..., Path]
COMPONENTS = {
    *("weights", "gradients", "optimizer", "checkpoints", "layer", "attention"),
    *("communication", "logits"),
}


@pytest.fixture
def llama_8b(config: WriteConfig) -> Path:
    """The config.json of Llama-3.1-8B."""
    return config(**LLAMA_8B)


@pytest.fixture
def any_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of all else: the longest row that fits is not searched for."""
    for module in ("advice", "search"):  # advice first: it must not import what is put here
        monkeypatch.setattr(f"longctx_patch.planner.{module}.longest", lambda job: 2**20)


def planned(run: Run, *words: object) -> Any:
    result = run("plan", *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_has_these_keys(run: Run, llama_8b: Path) -> None:
    found = planned(run, llama_8b, "--gpus", "4xH200", "--seq-len", "1M", "--full")
    assert set(found) == {
        *("model", "gpus", "seq_len", "rows_per_step", "left_out", "candidates", "max_seq_len"),
        *("recurrent_layers", "note"),
    }
    assert found["recurrent_layers"] == 0
    assert (found["rows_per_step"], found["left_out"]) == (None, {})
    assert (found["model"], found["gpus"], found["seq_len"]) == (str(llama_8b), "4xH200", 2**20)
    assert found["max_seq_len"] > 2**20
    assert {candidate["fits"] for candidate in found["candidates"]} == {True, False}
    offload = {"none", "checkpoints", "states", "checkpoints and states"}
    assert {candidate["offload"] for candidate in found["candidates"]} >= offload
    assert {candidate["attention_kept"] for candidate in found["candidates"]} == {1.0, 0.5, 0.0}
    for candidate in found["candidates"]:
        assert candidate.keys() >= {
            *("fits", "reason", "sp", "fsdp", "plan", "checkpoint", "offload", "peak_gib"),
            *("components_gib", "host_gib", "step_s", "tokens_per_second_per_gpu", "mfu"),
        }
        assert candidate["fits"] is (candidate["reason"] is None)
        assert candidate["flags"].startswith("--full --dtype float32 --ulysses ")
        assert sum(candidate["parts_s"].values()) == pytest.approx(candidate["step_s"])
        parts = candidate["components_gib"]
        assert set(parts) == COMPONENTS
        assert candidate["peak_gib"] == pytest.approx(sum(parts.values()))
        assert candidate["kept_free_gib"] > 0
        assert sum(candidate["layers"].values()) == 32
        assert 0 < candidate["mfu"] < 1


def test_text_has_a_table_its_parts_and_the_longest_row(run: Run, llama_8b: Path) -> None:
    words = (llama_8b, "--gpus", "4xH200", "--seq-len", "1M", "--full")
    first = planned(run, *words)["candidates"][0]
    text = run("plan", *words).stdout
    lines = text.splitlines()
    assert lines[0].startswith(f"{llama_8b} on 4xH200, rows of 1,048,576 tokens, every weight")
    row = lines[3].split()
    assert row[:5] == ["4", "(4", "x", "1)", "ulysses"]
    assert row[-1] == f"{first['mfu']:.1%}"
    assert row[-4:-2] == [f"{first['step_s']:.2f}", "1"]
    assert (
        "The first: --full --dtype float32 --ulysses 4 --ring 1 --checkpoint auto --mlp-tiles 3"
        in lines
    )
    assert "The model as published reaches" in text
    layer = next(line for line in lines if line.startswith("  layer "))
    assert float(layer.split()[1]) == pytest.approx(first["components_gib"]["layer"], abs=0.06)
    assert "do not fit; the nearest:" in text
    assert "that tensors may take on a GPU; most of it " in text
    assert lines[-4].startswith("Longest row that fits: ")
    assert lines[-4].endswith(" tokens, if host memory were unlimited (see --host-gib).")
    said = run("plan", *words[:-1], "--rank", 8).stdout.splitlines()[0]
    assert "LoRA of rank 8 (--full: every weight), loaded in float32" in said


@pytest.mark.usefixtures("any_longest")
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ([], ["--sequence-degree", "8", "--rope", "yarn"]),
        (["--full"], ["--sequence-degree", "8", "--rope", "yarn", "--full"]),
        (
            ["--rank", "8", "--also-train", "norms", "--rows-per-step", "6"],
            ["--rope", "yarn", "--rank", "8", "--also-train", "norms", "--rows-per-step", "6"],
        ),
    ],
)
def test_the_next_command_makes_the_folder(
    run: Run, llama_8b: Path, tmp_path: Path, options: list[str], more: list[str]
) -> None:
    """It is taken as it stands; 256K is longer than the model as published reaches."""
    said = run("plan", llama_8b, "--gpus", "16xH200", "--seq-len", "256K", *options).output
    words = shlex.split(said.splitlines()[-1].removeprefix("Next: "))
    wanted = ["longctx", "patch", str(llama_8b), "--gpus", "16xH200", "--seq-len", "262144"]
    wanted += ["--nodes", "2", *more]
    assert words == [*wanted, "--data", "DATA", "--out", "run/"]
    done = run(*words[1:-4], "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("any_longest")
def test_the_next_command_of_a_card_moves_states_to_the_host(run: Run, llama_8b: Path) -> None:
    words = ("plan", llama_8b, "--gpus", "RTX4090", "--host-gib", 64, "--dtype", "bfloat16")
    said = run(*words, "--seq-len", "8K").output.splitlines()
    assert "RTX4090: rates by data sheet, not measured." in said
    assert "--host-gib 64 --states-on-host --data DATA --out run/" in said[-1]
    assert "--attention-kept" not in said[-1]
    assert " --attention-kept 0 " in run(*words, "--seq-len", "184K").output.splitlines()[-1]


@pytest.mark.usefixtures("any_longest")
def test_an_adapter_is_planned_over_a_text_model(run: Run, tmp_path: Path) -> None:
    """`longctx patch` refuses one over a checkpoint that reads images."""
    seeing_config("qwen3_vl").save_pretrained(tmp_path / "seeing")
    words = ("plan", tmp_path / "seeing", "--gpus", "4xH200", "--seq-len", "256")
    assert f"patch {tmp_path / 'seeing/config.json'} " in run(*words).output.splitlines()[-1]
    (tmp_path / "seeing/model.safetensors").touch()
    said = run(*words).output.splitlines()[-1]
    first, second = said.removeprefix("Next: ").split(" && ")
    assert shlex.split(first)[-2:] == [str(tmp_path / "seeing"), "seeing-text"]
    assert shlex.split(second)[:3] == ["longctx", "patch", "seeing-text"]
    answer = run("families", tmp_path / "seeing").output
    assert f"Next: {first} && longctx patch seeing-text --seq-len" in answer
    said = run(*words, "--full").output.splitlines()[-1]
    assert said.startswith(f"Next: longctx patch {tmp_path / 'seeing'} ")


def test_the_longest_row_alone(run: Run, llama_8b: Path) -> None:
    words = (llama_8b, "--gpus", "H200", "--max-seq-len")
    as_text = run("plan", *words).stdout
    found = planned(run, *words)
    assert found == {"model": str(llama_8b), "gpus": "1xH200", "max_seq_len": found["max_seq_len"]}
    assert as_text == f"{found['max_seq_len']:,}\n"
    assert run("plan", *words, "--seq-len", "1M").stdout == as_text


def test_the_table_says_what_a_plan_says(run: Run, llama_8b: Path) -> None:
    """A cell has the longest row and the time of `longctx plan` for as large a host; with 4 bits
    where nothing else fits."""
    adapter, full = planned(run, llama_8b, "--gpus", "1xH100", "--table")
    assert (adapter["trained"], full["trained"]) == ("LoRA", "full")
    words = (llama_8b, "--gpus", "H100", "--host-gib", 200)
    most = planned(run, *words, "--max-seq-len")["max_seq_len"]
    assert adapter["max_seq_len"] == most
    first = planned(run, *words, "--seq-len", most)["candidates"][0]
    for name in ("step_s", "peak_gib", "host_gib"):
        assert adapter[name] == first[name]
    assert adapter["states_on_host"] is ("states" in first["offload"])
    lines = run(
        *("plan", llama_8b, "--gpus", "2xRTX4090", "--table", "--seq-len", "8K", "--host-gib", 14)
    ).stdout.splitlines()
    assert lines[0] == "RTX4090 (rates by data sheet, not measured)"
    assert lines[1].split() == ["1", "2"]
    assert re.search(r"  LoRA  8K\+ \d\.\ds \d+\+\d+ q +8K\+ ", lines[2])
    assert lines[3].split()[-2:] == ["-", "-"]
    assert "q: with `--load-in-4bit`, where" in " ".join(lines)


def test_the_table_names_what_it_cannot_predict(run: Run, config: WriteConfig) -> None:
    model = config(model_type="gpt_oss", num_local_experts=4)
    words = ("plan", model, "--gpus", "2xH100", "--table")
    assert "not predicted: num_local_experts=" in run(*words).stdout.splitlines()[2]
    (found,) = json.loads(run(*words, "--json").stdout)
    assert found["unpredicted"].startswith("not predicted: num_local_experts=")
    bare = run("plan", "--table")
    assert "name a kind of --gpus, or a MODEL, or both" in bare.stderr


def test_a_named_model_needs_no_network(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx_patch.cli.plan.load_model_config", None)
    monkeypatch.setattr(
        "longctx_patch.cli.plan.MACHINES", {"h200": MACHINES["h200"], "h100": MACHINES["h100"]}
    )
    found = run("plan", "Qwen/Qwen3-0.6B", "--table", "--seq-len", "4K", "--full").stdout
    lines = found.splitlines()
    assert [line for line in lines if line.startswith("H")] == ["H200", "H100"]
    assert lines[2].startswith("Qwen/Qwen3-0.6B  full  4K+ ")


@pytest.mark.usefixtures("any_longest")
def test_a_named_model_is_planned_where_its_config_cannot_be_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str) -> None:
        raise ValueError(f"{name} is not reachable")

    monkeypatch.setattr("longctx_patch.cli.plan.load_model_config", unreachable)
    words = ("plan", "Qwen/Qwen3-0.6B", "--gpus", "1xA100-80", "--seq-len", "8K")
    for more in ((), ("--json",), ("--max-seq-len",)):
        said = run(*words, *more)
        assert "by the model's published sizes" in said.stderr
        says_next = (
            "\nNext (it says whether the length needs --rope): longctx patch Qwen/Qwen3-0.6B "
        )
        assert (says_next in said.output) == (not more)
    assert run(*words[:3], "1xH200-80", *words[4:]).exit_code == 1  # an H200 has 141 GB
    other = run("plan", "Qwen/Other", "--gpus", "1xA100", "--seq-len", "8K")
    assert other.exit_code == 1
    assert "Qwen/Other is not reachable" in other.output


def test_options_reach_the_planner(run: Run, llama_8b: Path) -> None:
    words = (llama_8b, "--gpus", "4xH200", "--seq-len", "128K")

    def best(*more: object) -> Any:
        return planned(run, *words, *more)["candidates"][0]

    full, lora = best("--full"), best()
    assert lora["components_gib"]["optimizer"] < full["components_gib"]["optimizer"]
    more = best("--rank", 64)["components_gib"]["optimizer"]
    assert more == pytest.approx(4 * lora["components_gib"]["optimizer"])
    beside = best("--also-train", "embeddings,norms")
    assert beside["components_gib"]["optimizer"] > 2 * lora["components_gib"]["optimizer"]
    narrow = best("--load-in-4bit")
    # Each GPU holds all weights, most of them in half a byte; in bfloat16 four GPUs share them.
    assert narrow["components_gib"]["weights"] == pytest.approx(5.5, abs=0.3)
    assert narrow["flags"].startswith("--lora --rank 16 --load-in-4bit ")
    assert narrow["fsdp"] == 1
    assert best("--full", "--stock-layers")["step_s"] > full["step_s"]
    few = json.loads(run("plan", *words, "--host-gib", 10, "--json").stdout)["candidates"]
    assert any("may be taken on a host" in (each["reason"] or "") for each in few)


HYBRID = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}


def test_recurrent_layers_are_planned_and_named(run: Run, config: WriteConfig) -> None:
    words = (config(**HYBRID), "--gpus", "4xH200")
    found = planned(run, *words, "--seq-len", "64K")
    assert found["recurrent_layers"] == 3
    assert {candidate["sp"] for candidate in found["candidates"]} == {1, 2, 4}
    for candidate in found["candidates"]:
        assert candidate["parts_s"]["recurrence"] > 0
        assert candidate["attention_kept"] == 1 or candidate["ring"] == 1
    text = run("plan", *words, "--seq-len", "64K").stdout
    said = "3 of 4 layers are recurrent (gated delta nets): rates of their kernels are measured on "
    assert f"{said}H100." in text.splitlines()
    most = planned(run, *words, "--max-seq-len")["max_seq_len"]
    assert most == found["max_seq_len"] > 2**16


def test_no_row_at_all_says_why(run: Run, llama_8b: Path) -> None:
    words = (llama_8b, "--gpus", "H100", "--host-gib", 100, "--full")
    result = run("plan", *words, "--max-seq-len")
    assert (result.stdout, result.exit_code) == ("0\n", 1)
    assert "needs 120 GiB of the 95 that may be taken on a host" in result.stderr
    assert "What may fit: shorter rows, more GPUs, " in result.stderr
    for form in ([], ["--json"]):
        assert run("plan", *words, "--seq-len", "4K", *form).exit_code == 1


@pytest.mark.usefixtures("any_longest")
def test_the_config_says_the_dtype_and_whether_layers_are_fused(
    run: Run, config: WriteConfig
) -> None:
    """Without Liger's kernels for a family, the plan is that of `--stock-layers`."""
    words = (config(**LLAMA_8B, dtype="bfloat16"), "--gpus", "H200", "--seq-len", "4K")
    for asked, dtype in (((), "bfloat16"), (("--dtype", "float32"), "float32")):
        first = planned(run, *words, *asked)["candidates"][0]
        assert f"--lora --rank 16 --dtype {dtype} " in first["flags"]
    path = config(**LLAMA_8B, model_type="ernie4_5")
    words = (path, "--gpus", "H200", "--seq-len", "4K")
    assert planned(run, *words) == planned(run, *words, "--stock-layers")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        *(("131,072", 131072), ("131_072", 131072), ("128k", 131072), ("1M", 2**20)),
        *(("1.5M", 3 * 2**19), ("2", 2), (" 64 K ", 65536), ("1024M", 2**30)),
    ],
)
def test_tokens(text: str, tokens: int) -> None:
    assert Tokens().convert(text, None, None) == tokens


RANGE, FORM = "2 to 1,073,741,824", "write tokens as 131072, 128K or 1M"
BAD_TOKENS = {
    **dict.fromkeys(("1", "-3", "1.5", "1.0001k", "1025M"), RANGE),
    **dict.fromkeys(("", "K", "1kk", "1,5M", "1T", "1e400", "nan"), FORM),
}


def test_a_group_of_rows_is_compared_with_one_row_of_its_branches(run: Run, llama_8b: Path) -> None:
    words = (llama_8b, "--gpus", "H200", "--seq-len", "30K", "--branches", "4x1K")
    found = planned(run, *words)
    assert (found["seq_len"], found["branches"]) == (30 * 1024, [4, 1024])
    pairs = {each["checkpoint"]: each for each in found["compared"]}
    assert set(pairs) >= {"auto", "attention", "offload", "full"}
    assert {each["sp"] for each in found["compared"]} == {1}
    for name in ("attention", "offload", "full"):
        apart, once = pairs[name]["apart"], pairs[name]["once"]
        assert apart["fits"]
        # 120K tokens become 33K: at most so many times as fast.
        assert 3 < apart["seconds"] / once["seconds"] < 120 / 33
        assert once["peak_gib"] < apart["peak_gib"]
    lines = run("plan", *words).stdout.splitlines()
    assert "groups of 4 rows of 30,720 tokens that differ in their last 1,024, LoRA" in lines[0]
    assert [line.split()[1] for line in lines[3 : 3 + len(pairs)]] == list(pairs)


BAD_OPTIONS = {
    "--seq-len 4K --branches 2": "write a number of branches and the tokens of each",
    "--seq-len 4K --branches 2x4K": "2 branches of 4096 tokens of rows of 4096: two rows or more",
    "--seq-len 4K --branches 2x1K --rows-per-step 4": "--branches compares a step of one group",
    "": "--seq-len: say how long rows are, or ask --max-seq-len",
    "--table --max-seq-len": "--table has the longest rows, each shared by all GPUs",
    "--max-seq-len --tokens-per-step 1M": "--tokens-per-step 1048576 without --seq-len",
    "--seq-len 4K --gpus 4xH300": "Plan another card as the one that has its memory",
    "--seq-len 4K --host-gib nan": "--host-gib nan: ",
    "--seq-len 4K --full --rank 8": "--rank 8 with --full: a rank is for an adapter. Use --lora",
    "--seq-len 4K --full --also-train norms": "every weight is trained",
    "--seq-len 4K --png x.png": "--png is gone: the table lists",
    "--seq-len 4K --full --load-in-4bit": "4 bits are frozen. Use --lora",
    "--seq-len 4K --load-in-4bit --dtype float32": "computes in bfloat16",
}


@pytest.mark.parametrize("text", BAD_TOKENS)
def test_other_numbers_of_tokens_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter) as refusal:
        Tokens().convert(text, None, None)
    assert repr(text) in str(refusal.value)
    assert BAD_TOKENS[text] in str(refusal.value)


@pytest.mark.parametrize("words", BAD_OPTIONS)
def test_bad_options_are_refused(run: Run, llama_8b: Path, words: str) -> None:
    result = run(
        "plan", llama_8b, *([] if "--gpus" in words else ["--gpus", "H200"]), *words.split()
    )
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert BAD_OPTIONS[words] in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "mamba"}, "its recurrence is affine in its state"),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, "The planner knows dense"),
        ({"hidden_size": "big"}, "hidden_size='big': it counts"),
    ],
)
def test_other_models_are_refused(
    run: Run, config: WriteConfig, changes: dict[str, Any], part: str
) -> None:
    """tests/planner/test_model_shape.py has the models that can't be predicted."""
    result = run("plan", config(**changes), "--gpus", "H200", "--seq-len", "4K")
    assert result.exit_code == 1
    assert part in " ".join(result.stderr.split())


def test_constants_that_need_no_torch_are_the_planners() -> None:
    assert ", ".join(MACHINES) == KINDS


@pytest.mark.usefixtures("any_longest")
def test_the_rows_of_a_step(run: Run, llama_8b: Path) -> None:
    words = (llama_8b, "--gpus", "24xH200", "--seq-len", "32K", "--full")
    found = planned(run, *words, "--tokens-per-step", "1536K")
    assert found["rows_per_step"] == 48
    assert set(found["left_out"]) == {"3", "6", "12"}
    assert found["left_out"]["12"] == "groups of 12 GPUs would lie across nodes of 8"
    assert found["candidates"][0]["sp"] == 1  # every GPU trains two rows of its own
    for candidate in found["candidates"]:
        assert candidate["rows_at_once"] == 24 // candidate["sp"]
        assert candidate["rows_at_once"] * candidate["forwards"] == 48
        speed = 48 * 2**15 / candidate["step_s"] / 24
        assert candidate["tokens_per_second_per_gpu"] == pytest.approx(speed)
    text = run("plan", *words, "--rows-per-step", 48).stdout
    lines = text.splitlines()
    assert "48 rows a step, each of 32,768 tokens" in lines[0]
    assert lines[2].split()[-5:] == ["s/step", "rows", "forwards", "tokens/s/GPU", "MFU"]
    assert lines[3].split()[-4:-2] == ["24", "2"]
    assert "forwards: rows that each group of GPUs trains in a step, one after the other." in lines
    assert "  sp 3: groups of 3 GPUs would lie across nodes of 8" in lines
    few = run("plan", *words, "--rows-per-step", 6).stdout
    assert "  sp 2: 12 rows at once don't divide 6 rows a step" in few
    without = run("plan", *words).stdout
    assert "forwards" not in without
    assert "--rows-per-step N compares steps of the same rows." in without
    assert "--rows-per-step N" not in text  # where they are the same
    assert "  sp 3: groups of 3 GPUs would lie across nodes of 8" in without.splitlines()
