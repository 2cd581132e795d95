"""lora.py: a trainer's first step is compared with one process, then each length is timed."""

import json
from pathlib import Path

import launch
import launches
import lora
import lora_job
import pytest
from report import read_lines


def test_wrong_steps_are_reported_and_right_ones_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(script: Path, arguments: list[str], *_: object) -> launch.Ending:
        lora_job.run(json.loads(Path(arguments[0]).read_text()))
        return launch.Ending(1.0, None)

    read_model = lora_job.read_model

    def run_scaled(settings: lora.Row, job: lora_job.Job, watch: lora_job.Watch) -> None:
        def scaled(*given: lora_job.Any) -> lora_job.Any:
            model = read_model(*given)
            _, weight = lora_job.adapter_of(model)[0]
            weight.register_hook(lambda gradient: gradient * 2)
            return model

        with monkeypatch.context() as patched:
            patched.setattr(lora_job, "read_model", scaled)
            lora_job.run_trainer(settings, job, watch)

    monkeypatch.setattr(launches, "run_job", in_this_process)
    monkeypatch.setitem(lora_job.SYSTEMS, "sft", run_scaled)
    options = f"--out {tmp_path} --model tiny --num-layers 2 --tokens 32 48 --check-tokens 24"
    lora.main([*options.split(), *["--steps", "2", "--systems", "ours_fsdp2", "trainer", "sft"]])
    reference, *timed, wrong = read_lines(tmp_path / "lora.jsonl")
    # The matrices A and B of seven linear layers, in the first and the last of two layers.
    assert len(reference["one_process"]) == 1 + 2 * 2 * 7
    assert all(norm > 0 for norm in reference["one_process"].values())
    assert [(row["system"], row["num_tokens"]) for row in timed] == [
        (system, tokens) for system in ("ours_fsdp2", "trainer") for tokens in (32, 48)
    ]
    for row in timed:
        assert row["status"] == "ok"
        assert row["tokens_per_s_per_gpu"] == pytest.approx(row["num_tokens"] / row["seconds"])
        assert len(row["losses"]) == 2 + (4 if row["system"] == "ours_fsdp2" else 1)
        assert max(row["check"]["differences"].values()) < 1e-4
    assert wrong["status"] == "wrong"
    assert "0.mlp.down_proj.lora_A.default.weight of 24 tokens" in wrong["reason"]
    assert "off by 1, allowed" in (tmp_path / "lora.md").read_text()
