"""`longctx schedule`: known numbers as JSON, pictures that hold what they should, clear errors."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from longctx_patch import LongContextConfig
from longctx_patch.cli import timeline
from longctx_patch.cli.mask_picture import owners
from longctx_patch.cli.schedule_command import PLANS, make_setting, read_hardware
from longctx_patch.cli.timeline import HELPER, OTHER_KEYS, OWN, bars_of, draw_schedule, make_figure
from longctx_patch.planner.attention_cost import Prediction, Workload, predict
from longctx_patch.plans import Direction
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import documents_mask
from longctx_patch.sequence.placement import place
from tests.cli.conftest import Run

SCHEMA = {
    **{"plan": str, "direction": str, "ranks": int},
    **dict.fromkeys(("idle_fraction", "makespan_s", "exposed_communication_s"), float),
    **dict.fromkeys(("bytes_sent_per_rank", "messages_per_rank"), list),
}


def ask(run: Run, *words: object) -> Any:
    """What `longctx schedule WORDS --json` prints: JSON and nothing else."""
    result = run("schedule", *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refuse(run: Run, *words: object) -> str:
    """The error message of `longctx schedule WORDS`, which refuses them."""
    result = run("schedule", *words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_as_json(run: Run, plan: str) -> None:
    answer = ask(run, "--plan", plan, "--ranks", 8, "--ranks-per-node", 4)
    for name, kind in SCHEMA.items():
        assert isinstance(answer[name], kind), name
    assert answer["plan"] == ("zigzag" if plan == "burst" else plan)
    assert (answer["ranks"], answer["direction"]) == (8, "forward")
    assert len(answer["bytes_sent_per_rank"]) == len(answer["messages_per_rank"]) == 8
    assert answer["makespan_s"] > answer["exposed_communication_s"] >= 0
    assert 0 <= answer["idle_fraction"] < 1


def test_ulysses_and_burst(run: Run) -> None:
    answer = ask(run, "--plan", "zigzag", "--ranks", 8, "--ulysses", 4)
    assert (answer["plan"], answer["ranks"], answer["ulysses_degree"]) == ("zigzag", 8, 4)
    assert ask(run, "--plan", "ulysses", "--ranks", 8)["ulysses_degree"] == 8
    result = run("schedule", "--plan", "burst", "--ranks", 4)
    assert "burst has no forward of its own: zigzag runs" in result.stderr
    backward = run("schedule", "--plan", "burst", "--ranks", 4, "--direction", "backward")
    assert backward.stderr == ""
    assert backward.stdout.startswith("burst backward over 4 ranks")


def test_double_ring_fills_the_nodes_of_the_hardware(run: Run) -> None:
    words = ["--plan", "double_ring", "--ranks", 16]
    assert ask(run, *words) == ask(run, *words, "--ranks-per-node", 8)
    assert ask(run, *words) != ask(run, *words, "--ranks-per-node", 4)
    assert ask(run, *words, "--ulysses", 2)["ulysses_degree"] == 2


def test_compare_covers_both_directions(run: Run) -> None:
    rows = ask(run, "--compare", "--ranks", 8)
    assert {"zigzag", "ulysses", "distflash_balanced"} <= {row["plan"] for row in rows}
    assert all(row.keys() >= {*SCHEMA, "chosen", "slower"} for row in rows)
    backward = ask(run, "--compare", "--ranks", 8, "--direction", "backward")
    assert backward == [row for row in rows if row["direction"] == "backward"] != rows
    table = run("schedule", "--compare", "--ranks", 8)
    assert "distflash_balanced" in table.stdout


def test_summary_for_people(run: Run) -> None:
    result = run("schedule", "--plan", "distflash", "--ranks", 8)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert result.stdout.startswith("distflash forward over 8 ranks (contiguous tokens)")
    assert "131,072 tokens, 32 / 8 heads of 128, bfloat16, h100 with flash_attn_4" in result.stdout
    assert "ms  lost to messages: waiting, and kernels slower" in result.stdout
    assert "Work is split unevenly (11.1% imbalance). Waiting in practice: " in result.stdout
    packed = run("schedule", "--plan", "auto", "--ranks", 4, "--document-tokens", "2K").stdout
    assert "imbalance" not in packed  # its ranks don't go step by step
    assert "Waiting in practice: " in packed


def test_heads_are_those_of_the_model(run: Run, config: Callable[..., Path]) -> None:
    path = config(num_attention_heads=16, num_key_value_heads=4, head_dim=64)
    words = ["--plan", "zigzag", "--ranks", 4]
    assert "131,072 tokens, 16 / 4 heads of 64" in run("schedule", path, *words).stdout
    assert "--kv-heads is gone: heads are those of MODEL" in refuse(
        run, path, *words, "--kv-heads", 4
    )
    assert "no such file or folder" in refuse(run, "./nowhere", *words)


def test_latents_travel_in_a_ring_and_padded_heads_under_ulysses(
    run: Run, config: Callable[..., Path]
) -> None:
    """16 heads with keys of 192 numbers and values of 128; a latent of 512 + 64."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "v_head_dim": 128}
    path = config(model_type="deepseek_v3", **sizes, **heads)
    words = ["--ranks", 4, "--seq-len", 4096]
    ring = ask(run, path, "--plan", "zigzag", *words)["bytes_sent_per_rank"]
    assert ring == [3 * 1024 * (512 + 64) * 2] * 4
    ulysses = ask(run, path, "--plan", "ulysses", *words)["bytes_sent_per_rank"]
    assert ulysses == [3 * 1024 * (16 // 4) * 192 * 4 * 2] * 4  # q, k, v there and out back
    described = run("schedule", path, "--plan", "zigzag", *words).output
    assert "16 / 16 heads of 192, latents of 576, bfloat16" in described


DELTA = {
    **{"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 64},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}


def test_recurrent_layers_count_in_the_choice(run: Run, config: Callable[..., Path]) -> None:
    words = ["--compare", "--ranks", 2, "--seq-len", 4096]
    assert "Recurrent layers count in" in run("schedule", config(**DELTA), *words).output
    assert "Recurrent layers" not in run("schedule", *words).output


def test_a_picture_is_drawn_beside_the_json(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "schedule.PNG"
    assert ask(run, "--plan", "zigzag", "--ranks", 1, "--out", out)["ranks"] == 1
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def predicted(plan: str, ranks: int, direction: Direction, ulysses: int | None) -> Prediction:
    workload, hardware = Workload(num_tokens=131072), read_hardware("h100", None)
    setting = make_setting(plan, ranks, ulysses, workload, hardware)
    return predict(setting, direction, workload, hardware, with_timeline=True)


def test_picture_shows_every_span_where_it_belongs() -> None:
    forward = predicted("distflash", 4, Direction.FORWARD, None)
    shown: dict[tuple[int, tuple[str, str]], float] = defaultdict(float)
    for bar in bars_of(forward):
        shown[bar.rank, bar.style] += bar.width_ms
    for rank in range(4):
        spans = [span for span in forward.timeline if (span.rank, span.lane) == (rank, "compute")]
        drawn = sum(shown[rank, style] for style in (OWN, OTHER_KEYS, HELPER))
        assert drawn == pytest.approx(1e3 * sum(s.stop_s - s.start_s for s in spans))
        assert shown[rank, OWN] > 0
        assert (shown[rank, HELPER] > 0) == (rank == 0)  # rank 0 helps rank 3
    figure = make_figure(forward, "assumptions", Workload(num_tokens=131072))
    assert "distflash, forward, 4 ranks\n" in figure.get_suptitle()
    assert figure.get_suptitle().endswith("\nassumptions")
    names = {text.get_text() for text in figure.legends[0].get_texts()}
    assert names == {
        *("own queries, own keys", "own queries, keys of others", "queries of others, own keys"),
        *("keys and values", "queries", "partial outputs"),
    }


@pytest.mark.parametrize("length", [31, 1201])
def test_the_mask_of_branches_is_drawn_in_the_colours_of_ranks(length: int) -> None:
    row = Documents.group(length, 3, 7)
    assert row == Documents((length - 8, 8, 8, 8), length + 16, (-1, 0, 0, 0))
    layout, mask = place("balanced", row, ring=3), documents_mask(row)
    found, step = owners(mask, layout), 1 if length == 31 else 3
    assert np.array_equal(found >= 0, mask.dense()[::step, ::step])
    for rank in range(3):
        held = set(layout.positions(rank).tolist())
        assert {step * int(query) for query in np.nonzero(found == rank)[0]} <= held


def test_branches_are_predicted_and_drawn(run: Run, tmp_path: Path) -> None:
    words = ["--plan", "auto", "--ranks", 2, "--seq-len", "4K", "--out", tmp_path / "all.png"]
    output = run("schedule", *words, "--branches", "2x1K").output
    assert "5,121 tokens, 3 documents of which 2 are branches" in output
    workload = Workload(num_tokens=9, lengths=(3, 2, 4), parents=(-1, 0, 0))
    axes = make_figure(predicted("zigzag", 2, Direction.FORWARD, None), "", workload).axes
    assert [ax.get_ylabel() for ax in axes] == ["queries", "", "rank of the query"]


BAD_INPUT = {
    "--plan auto --ranks 2 --branches 8": "'8': write a number of branches and the tokens of each",
    "--plan auto --ranks 2 --branches 8xK": "'K': write tokens as",
    "--plan auto --ranks 2 --branches 1x4": "1 branches of 4 tokens of rows of 131072: two rows",
    "--plan auto --ranks 2 --seq-len 5 --branches 2x4": "rows of 5: two rows or more share two",
    "--compare --ranks 2 --branches 2x4 --document-tokens 9": "Leave one of them out",
    "--plan zigzag --ranks 0": "0 is not in the range x>=1",
    "--plan zigzag": "--ranks",
    "--plan zigzag --ranks 8 --seq-len 0": "'0': give a whole number of tokens, 1 to",
    "--plan zigzag --ranks 8 --ulysses 3": "must divide the ranks. Use --ulysses 1 or 2 or 4 or 8",
    "--plan ulysses --ranks 64": "Use ulysses_degree <= 32",
    "--plan ulysses --ranks 8 --ulysses 2": "Use --ulysses 8, or name the plan of the ring",
    "--plan double_ring --ranks 12": "Use --ranks-per-node 1 or 2 or 3 or 4 or 6 or 12",
    "--plan double_ring --ranks 8 --ulysses 2 --ranks-per-node 3": (
        "whole Ulysses groups. Use --ranks-per-node 2 or 4 or 8"
    ),
    "--ranks 8 --plan zigzag-direct": "Did you mean 'zigzag_direct'?",
    "--plan zigzag --ranks 8 --compare": "--compare with --plan zigzag: exactly one of them",
    "--ranks 8": "neither --plan nor --compare: exactly one of them",
    "--compare --ranks 8 --out all.png": "--compare with --out 'all.png': a picture shows one",
    "--compare --ranks 8 --ulysses 2": "the degrees are compared too. Leave --ulysses out",
    "--plan zigzag --ranks 8 --out a.jpg": "one of .png, .svg, .pdf. Use --out 'a.png'",
    "--plan zigzag --ranks 8 --out picture": "Use --out 'picture.png'",
    "--plan zigzag --ranks 8 --out .png": "Use --out 'schedule.png'",
    "--compare --ranks 4 --window 0": "'0': give a whole number of tokens",
    "--plan zigzag --ranks 8 --out none/a.png": "no folder 'none', and none is made. Make it first",
    "--plan zigzag --ranks 65 --out a.png": "Use --ranks 64 or fewer, or --json",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert BAD_INPUT[words] in refuse(run, *words.split(), "--json")
    assert list(tmp_path.iterdir()) == []


def test_drawing_without_matplotlib(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ("--plan", "zigzag", "--ranks", 8)
    assert "pip install longctx-patch[draw]" in refuse(run, *words, "--out", tmp_path / "a.png")
    assert ask(run, *words)["plan"] == "zigzag"


def test_packed_rows_and_windows(run: Run) -> None:
    words = ["--ranks", 4, "--hardware", "h200"]
    text = run("schedule", "--compare", *words, "--window", 4096, "--document-tokens", 8192).stdout
    assert "131,072 tokens, 16 documents, a window of 4,096, 32 / 8 heads" in text
    assert "ulysses 2 x halo (balanced)" in text
    for plan in ("halo", "ring", "allgather", "auto"):  # as configs with these plans place rows
        one = ask(run, "--plan", plan, *words, "--document-tokens", 2048)
        assert one["layout"] == "balanced", plan
    one = ask(run, "--plan", "zigzag", *words, "--document-tokens", 2048)
    assert one["layout"] == "zigzag"
    one = ask(run, "--plan", "auto", *words, "--window", 4096)
    assert (one["plan"], one["layout"]) == ("halo", "zigzag")


WORKLOAD = Workload(num_tokens=131072)


def test_the_picture_is_of_what_the_config_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Prediction, str]] = []

    really = timeline.draw

    def draw(prediction: Prediction, file: BinaryIO, *, caption: str, workload: Workload) -> None:
        drawn.append((prediction, caption))
        really(prediction, file, caption=caption, workload=workload)

    monkeypatch.setattr(timeline, "draw", draw)
    config = LongContextConfig(ulysses_degree=2, ring_degree=2, plan="zigzag", hardware="h200")
    picture = draw_schedule(config, WORKLOAD, "backward")
    ((prediction, caption),) = drawn
    assert (prediction.plan, prediction.ranks) == ("zigzag", 4)
    assert (prediction.ulysses_degree, prediction.direction) == (2, Direction.BACKWARD)
    assert "131,072 tokens" in caption
    assert "h200" in caption
    assert picture._repr_png_().startswith(b"\x89PNG\r\n")
    assert repr(picture) == f"<picture of {len(picture.png)} bytes>"


def test_more_ranks_than_can_be_read() -> None:
    with pytest.raises(ValueError, match=r"ring_degree=128 = 128 ranks.* Use smaller degrees"):
        draw_schedule(LongContextConfig(ring_degree=128), WORKLOAD)


def test_what_waits_in_practice_is_at_least_what_is_unevenly_split(run: Run) -> None:
    even, uneven = (
        ask(run, "--plan", p, "--ranks", 8)["waiting_fraction"] for p in ("zigzag", "ring")
    )
    assert 0 < even < 0.1
    assert uneven == pytest.approx(7 / 15, abs=0.05)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("longctx_patch.cli.timeline.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"draw_schedule: .*pip install longctx-patch\[draw\]"):
        draw_schedule(LongContextConfig(ring_degree=4), WORKLOAD)
