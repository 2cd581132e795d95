"""The benchmark of several GPUs: how runs are read, left out and compared."""

from pathlib import Path
from typing import Any

import pytest
import scaling


def row(gpus: int, system: str, tokens: int, rate: float) -> dict[str, Any]:
    found = {"gpus": gpus, "system": system, "num_tokens": tokens, "status": "ok"}
    return found | {"model_tflops_per_s_per_gpu": rate}


def test_runs_are_read() -> None:
    count, system = scaling.parts_of("4 ours:ulysses=2,shards=row,lora=true,checkpoint=auto")
    assert count == 4
    config = scaling.config_in(system)
    assert (config.sequence_degree, config.checkpoint) == (2, "auto")
    assert [scaling.parts_of(run)[0] for run in scaling.DEFAULT].count(4) == 7


@pytest.mark.parametrize("run", ["ours", "0 ours", "4 alst", "2 ours:ulises=2", "2 ours:plan=new"])
def test_runs_that_cannot_be_read_are_refused(run: str) -> None:
    with pytest.raises(ValueError):
        scaling.parts_of(run)


def test_a_run_for_more_gpus_than_there_are_is_left_out(tmp_path: Path) -> None:
    arguments = scaling.parse_arguments(["--out", str(tmp_path), "--gpus", "2"])
    (found,) = scaling.run_one(arguments, "4 ours:ulysses=4", 0, [], 10.0)
    assert (found["status"], found["gpus"]) == ("not run", 4)
    assert found["reason"] == "4 GPUs are wanted, and 2 are there"


def test_rates_are_compared_with_one_gpu_that_has_as_many_tokens() -> None:
    rows = [
        row(1, "ours", 64, 10.0),
        row(1, "ours:lora=true", 64, 8.0),
        row(2, "ours:ulysses=2", 128, 9.0),
        row(2, "ours:ulysses=2", 64, 5.0),  # of 32 tokens a GPU
        row(4, "ours:ulysses=2,lora=true", 128, 6.0),
    ]
    found = [each.get("of_one_gpu") for each in scaling.with_efficiency(rows)]
    assert found == [1.0, 1.0, 0.9, None, 0.75]
