"""predicted.py: a run beside what was predicted of it."""

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


@pytest.mark.parametrize(
    ("options", "host_bytes"),
    # Inputs, attention's output and lse of three layers, in float32 here.
    [("checkpoint=offload", 3 * 4096 * 4 * (64 + 64 + 4)), ("checkpoint=attention,lora=true", 0)],
)
def test_a_run_is_measured(tmp_path: Path, options: str, host_bytes: int) -> None:
    out = tmp_path / "predicted.jsonl"
    run = f"tiny:tokens=4096,fused=false,dtype=float32,steps=1,warm_ups=0,{options}"
    predicted.main(["--out", str(out), run])
    row = json.loads(out.read_text())
    assert row["run"] == run
    assert row["measured_host_gib"] == host_bytes / GIB
    assert min(row["measured_s"], row["predicted_gib"], row["mfu"]) > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpt:tokens=8"], "name one of tiny"),
        (["tiny:layers=2"], "say tokens="),
        (["tiny:tokens"], "'tokens' has no value"),
        (["tiny:tokens=8,text=1"], "Options are"),
        (["tiny:tokens=8,checkpoint=x"], "choose one of"),
        (["--states-on-host", "tiny:tokens=8"], "there is none"),
    ],
)
def test_refusals(
    words: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        predicted.main(["--out", "x", *words])
    assert says in capsys.readouterr().err
