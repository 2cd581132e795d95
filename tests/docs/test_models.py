"""docs/reference/models.md is what the planner says: its words, and a few cells computed anew."""

import re

import pytest

from docs.make_models import BELOW, PAGE, parts
from longctx_patch.cli.plan import PlanOptions
from longctx_patch.cli.plan_group import columns, compare_group, kind
from longctx_patch.cli.plan_table import cell
from longctx_patch.planner.named_models import NAMED

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_words_are_the_codes() -> None:
    for part in parts():
        assert part in TEXT, "run `make models`"
    assert "Not predicted: gpt-oss-20b (num_local_experts=32)." in TEXT


@pytest.mark.parametrize(
    ("hub_name", "is_lora", "gpus"),
    [
        ("Qwen/Qwen3-32B", True, "1xH100"),
        ("google/gemma-3-12b-pt", False, "8xH200"),
        ("Qwen/Qwen3-32B", True, "1xL40S"),  # of 4 bits
        ("meta-llama/Llama-3.1-8B", True, "1xRTX4090"),
        ("Qwen/Qwen3.5-9B", False, "1xRTX5090"),  # nothing fits
    ],
)
def test_cells_are_what_is_predicted(hub_name: str, is_lora: bool, gpus: str) -> None:
    model, (count, kind) = NAMED[hub_name], gpus.split("x", 1)
    options = PlanOptions(table=True, lora=is_lora)
    job = options.jobs(hub_name, model.config())[0]
    table = TEXT.partition(f"## {kind}\n")[2].partition("\n## ")[0]
    way = "LoRA" if is_lora else "full"
    (line,) = re.findall(rf"^\| {re.escape(model.name)}(?:\\\*)? \| {way} \| .*$", table, re.M)
    written = line.split(" | ")[2:][(1, 2, 4, 8).index(int(count))].removesuffix(" |")
    assert written.replace("&lt;", "<") == cell(job, gpus).text, "run `make models`"


def test_the_page_of_one_card_says_what_is_predicted() -> None:
    text = (PAGE.parents[1] / "how-to/one-24gb-card.md").read_text(encoding="utf-8")
    model, card = NAMED["Qwen/Qwen3-8B"], "1xRTX4090"
    ways: dict[str, tuple[PlanOptions, float]] = {
        "--load-in-4bit": (PlanOptions(load_in_4bit=True), 64),
        "--states-on-host": (PlanOptions(), 64),
        "--full --states-on-host": (PlanOptions(lora=False), 192),
    }
    for way, (options, host_gib) in ways.items():
        job = options.jobs(model.hub_name, model.config())[0]
        longest = cell(job, card, host_gib=host_gib).as_json()
        short = cell(job, card, host_gib=host_gib, most=32768).as_json()
        assert longest["states_on_host"] is short["states_on_host"] is ("states" in way)
        memory = f"{short['peak_gib']:.1f} + {short['host_gib']:.0f}"
        row = f"{host_gib} | {longest['max_seq_len']:,} | {short['step_s']:.1f} | {memory}"
        assert f"| `{way}` | {row} |" in text


def test_the_page_of_shared_beginnings_says_what_is_predicted() -> None:
    text = (PAGE.parents[1] / "explanation/shared-beginnings.md").read_text(encoding="utf-8")
    model, policies = NAMED["meta-llama/Llama-3.1-8B"], ("auto", "attention", "full")
    written = re.findall(r"^\|.* \| `\w+` \| (.*) \|$", text, re.M)
    for length, count, own in ((62_000, 2, 2_000), (31_000, 8, 1_000)):
        job = PlanOptions(seq_len=length, gpus="2xH200").job(model.hub_name, model.config())
        pairs = {kind(pair.once): pair for pair in compare_group(job, count, own)}
        for name in policies:
            _, _, *cells, faster = columns(pairs[2, name])
            apart_s, apart_gib, once_s, once_gib = cells
            found = f"{apart_s} s, {apart_gib} GiB | {once_s} s, {once_gib} GiB | {faster}"
            assert written.pop(0) == found
    assert not written


def test_a_star_is_where_the_page_has_a_measured_run() -> None:
    assert BELOW.startswith("\\*: ")
    starred = set(re.findall(r"^\| (\S+)\\\* ", TEXT, re.M))
    assert starred == {model.name for model in NAMED.values() if model.measured_on}
