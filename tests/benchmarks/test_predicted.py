"""predicted.py: runs beside what was predicted of them, and a failure costs its row only."""

import json
from pathlib import Path

import predicted
import pytest
from runs import Run

from longctx_patch.predict.machines import GIB


def test_a_run_is_a_line_of_text() -> None:
    run = Run.parse(
        "llama-8b:layers=2,tokens=4096,ulysses=2,lora=true,attention_kept=0.5,checkpoint=offload"
    )
    assert (run.model, run.layers, run.tokens, run.lora) == ("llama-8b", 2, 4096, True)
    assert (run.config.ulysses_degree, run.config.attention_kept) == (2, 0.5)
    result = run.predicted("2xH200")
    # Two layers' inputs, and attention of half of the tokens, on the host.
    per_token = 2 * 4096 + 0.5 * (2 * 4096 + 4 * 32)
    assert result.host_bytes == 2 * 4096 * per_token
    assert result.job.shape.num_layers == 2


def test_runs_are_measured_and_those_that_fail_cost_their_row(tmp_path: Path) -> None:
    """The second asks for a kernel that this machine does not have."""
    small = "tokens=4096,fused=false,dtype=float32,steps=1,warm_ups=0"
    runs = [
        f"tiny:{small},checkpoint=offload",
        f"tiny:{small},checkpoint=attention,kernel=cudnn",
        f"tiny:{small},checkpoint=attention,lora=true",
    ]
    words = ["--out", str(tmp_path), "--gpus", "1", "--limit-s", "60", "--runs", *runs]
    predicted.main(words)
    rows = [json.loads(line) for line in (tmp_path / "predicted.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows] == runs
    good, failed, last = rows
    assert "kernel='cudnn'" in failed["problem"]
    # Inputs, attention's output and lse of three layers, in float32 here.
    assert good["measured_host_gib"] == 3 * 4096 * 4 * (64 + 64 + 4) / GIB
    assert last["measured_host_gib"] == 0
    for row in (good, last):
        assert row["measured_s"] > 0
        assert row["loss"] == pytest.approx(5.57, abs=0.1)  # about ln 259
        assert row["predicted_gib"] > 0
    table = (tmp_path / "predicted.md").read_text()
    assert all(f"| {run} |" in table for run in runs)


def test_states_are_not_moved_from_a_gpu_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        predicted.main(["--out", "x", "--gpus", "1", "--states-on-host", "--runs", "tiny:tokens=8"])
    assert "there is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("gpt:tokens=8", "name one of tiny"),
        ("tiny:layers=2", "say tokens="),
        ("tiny:tokens", "'tokens' has no value"),
        ("tiny:tokens=8,text=1", "Options are"),
        ("tiny:tokens=8,checkpoint=x", "choose one of"),
    ],
)
def test_refusals(run: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predicted.main(["--out", "x", "--gpus", "1", "--runs", run])
    assert says in capsys.readouterr().err
