"""`longctx verify` passes where the engine is right and fails where it is broken on purpose."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from longctx_patch import LongContextConfig
from longctx_patch.cli import verify
from longctx_patch.engine.accumulate import SoftmaxMerge
from longctx_patch.sequence.layout import Layout
from longctx_patch.transport import Counters
from longctx_patch.transport.processes import run_processes
from longctx_patch.verification import proof
from longctx_patch.verification.proof import run_rank
from tests.cli.conftest import Run

SCHEMA = {
    **dict.fromkeys(("family", "mask", "plan", "layout"), str),
    **dict.fromkeys(("ulysses", "ring", "messages", "bytes"), int),
    **dict.fromkeys(("loss_rel_err", "logits_rel_err", "grad_rel_err", "grad_norm_rel_err"), float),
}


def break_merge() -> None:
    right = SoftmaxMerge.result
    SoftmaxMerge.result = lambda self: (right(self)[0], right(self)[1] * 1.001)  # type: ignore[method-assign]


def break_positions() -> None:
    Layout.positions = lambda self, rank, device=None: torch.arange(  # type: ignore[method-assign]
        self.sizes[rank], device=device
    )


def break_traffic() -> None:
    right = Counters.sent
    Counters.sent = lambda self, num_bytes: right(self, num_bytes + 1)  # type: ignore[method-assign]


def broken_rank(rank: int, break_engine: Callable[[], None], *job: Any) -> Any:
    break_engine()
    return run_rank(rank, *job)


def test_every_way_over_two_processes_as_json(run: Run, config: Callable[..., Path]) -> None:
    path = config(model_type="qwen2", num_key_value_heads=1)
    result = run("verify", path, "--nproc", 2, "--json", "--checkpoint", "attention")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["ok"] is True
    assert [(case["ulysses"], case["ring"], case["layout"]) for case in answer["cases"]] == [
        (1, 2, "zigzag"),
        (1, 2, "contiguous"),
        (2, 1, "zigzag"),
        (2, 1, "contiguous"),
    ]
    for case in answer["cases"]:
        for name, kind in SCHEMA.items():
            assert isinstance(case[name], kind), name
        assert max(case[name] for name in SCHEMA if name.endswith("_err")) <= 1e-5
        assert (case["messages"], case["bytes"]) == (
            case["predicted_messages"],
            case["predicted_bytes"],
        )
        assert case["messages"] > 0


def test_one_cut_in_float64_as_a_table(run: Run, config: Callable[..., Path]) -> None:
    """Rows are packed, and the model has windows and a softcap."""
    words = ["--nproc", 3, "--ring", 3, "--layout", "balanced", "--dtype", "float64", "--packed"]
    path = config(model_type="gemma2", sliding_window=9)
    result = run("verify", path, *words, "--seq-len", 61)
    assert result.exit_code == 0, result.output
    assert "61 tokens, 3 process(es) against one, float64" in result.stdout
    row = "10 documents, softcap 5"  # two rows of five, joined
    assert f"mask: window 9, {row} + causal, {row}\n" in result.stdout
    assert "tolerance 1e-10" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("verify: ok: 1 of 1 cases equal")


def test_a_hybrid_with_packed_rows(run: Run, config: Callable[..., Path]) -> None:
    """One recurrent layer and one with attention are kept."""
    path = config(
        model_type="qwen3_5_text",
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    words = ["--nproc", 2, "--ring", 2, "--layout", "contiguous", "--packed"]
    result = run("verify", path, *words, "--seq-len", 61, "--json")
    assert result.exit_code == 0, result.output
    (case,) = json.loads(result.stdout)["cases"]
    assert "recurrent" in case["mask"]
    assert max(case[name] for name in SCHEMA if name.endswith("_err")) < 1e-10
    assert case["bytes"] == case["predicted_bytes"] > 0


def test_degrees_alone_say_how_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def note(_: object, configs: list[LongContextConfig], **options: object) -> None:
        asked.extend((config.ulysses_degree, config.ring_degree) for config in configs)

    monkeypatch.setattr("longctx_patch.verification.verify", note)
    monkeypatch.setattr(verify, "load_target", lambda _: verify.Target(model_config=LlamaConfig()))
    for nproc, ulysses, ring in ((None, 3, None), (None, None, 3), (None, 2, 2), (4, None, 2)):
        options = verify.VerifyOptions(layout="zigzag", nproc=nproc, ulysses=ulysses, ring=ring)
        verify.run("model", options)
    assert asked == [(3, 1), (1, 3), (2, 2), (2, 2)]


def test_one_process_sends_nothing(run: Run, config: Callable[..., Path]) -> None:
    result = run("verify", config(), "--nproc", 1, "--layout", "zigzag", "--json")
    assert result.exit_code == 0, result.output
    (case,) = json.loads(result.stdout)["cases"]
    assert (case["plan"], case["messages"], case["bytes"]) == ("single", 0, 0)
    assert case["logits_rel_err"] == 0.0
    assert max(case["loss_rel_err"], case["grad_rel_err"]) < 2e-6  # the chunked loss rounds anew
    assert (case["family"], case["mask"]) == ("Llama 1 to 3", "stock attention")


@pytest.mark.parametrize("break_engine", [break_merge, break_positions, break_traffic])
def test_a_broken_engine_is_found(
    run: Run,
    config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    break_engine: Callable[[], None],
) -> None:
    """Only the ranks' engine is broken; this process, which computes the reference, is not."""

    def run_broken(_: object, num_ranks: int, *job: Any, timeout_s: float) -> list[Any]:
        return run_processes(broken_rank, num_ranks, break_engine, *job, timeout_s=timeout_s)

    monkeypatch.setattr(proof, "run_processes", run_broken)
    result = run("verify", config(), "--nproc", 2, "--ring", 2, "--layout", "contiguous", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    if break_engine is break_traffic:  # the check of the first step raises
        assert answer["cases"] == []
        assert "sequence parallelism did not run as planned" in answer["error"]
        return
    (case,) = answer["cases"]
    assert case["ok"] is False
    assert case["grad_rel_err"] > 1e-4
    assert case["bytes"] == case["predicted_bytes"]
