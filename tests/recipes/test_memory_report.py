"""The error of a run out of memory says what was predicted, what was used, what to change."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig

from longctx_patch.planner.job import parse_cluster
from longctx_patch.recipes import memory_report, rehearsal, text_trainer
from longctx_patch.recipes.settings import Settings, parse_settings
from tests.memory.live_bytes import LiveBytes
from tests.planner.jobs import LLAMA_8B
from tests.recipes.conftest import Start, numbers, settings_of
from tests.tiny_llama import TINY_LLAMA

import tests.benchmarks  # puts the scripts' folder on the path  # noqa: F401  # isort: skip
from model_shapes import model_config

GIB = 2**30


SHAPE = LlamaConfig(**LLAMA_8B)


def settings(**values: Any) -> Settings:
    given = {"seq_len": 131072, "full": True, "dtype": "float32", "ulysses": 4}
    return settings_of(**{**given, "hardware": "h200", **values})


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total_memory=int(139.8 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.setattr(memory_report.host, "total_bytes", lambda: 2048 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 120 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 131 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 138.5 * GIB)


def report(config: Any = SHAPE, *, num_gpus: int = 4, **values: Any) -> str:
    """The message of a run on `num_gpus` GPUs that ran out of memory."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=num_gpus, is_fsdp2=True, state=SimpleNamespace()
    )
    accelerator.state.fsdp_plugin = SimpleNamespace(cpu_offload=None)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
    with (
        pytest.raises(memory_report.OutOfMemory) as said,
        memory_report.explained(settings(**values), config, accelerator),
    ):
        raise error
    return str(said.value)


@pytest.mark.usefixtures("on_h200")
def test_what_was_used_and_predicted_and_flags_that_fit() -> None:
    lines = report(checkpoint="none").splitlines()
    assert lines[0] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    used = "tensors held 120.0 GiB, at most 131.0, and the allocator 138.5"
    assert lines[1] == f"Used: {used}, of 139.8 on this GPU."
    assert lines[2].startswith("Predicted: 17")
    assert "checkpoints 144" in lines[2]
    assert (
        "To change: --full --dtype float32 --ulysses 4 --ring 1 --checkpoint auto --mlp-tiles 1 is"
        in lines[3]
    )


@pytest.mark.usefixtures("on_h200")
def test_the_flags_are_the_recipes() -> None:
    """The advice parses as flags of the recipe; what the YAML decides is named as its line."""
    said = report(checkpoint="none", full=False, lora_rank=8, dtype="bfloat16").splitlines()[3]
    words = said.split("To change: ")[1].split(" is predicted")[0].split()
    required = ["--model", "m", "--output", "out", "--text", "t", "--seq-len", "8"]
    found = parse_settings([*required, *words])
    assert (found.lora_rank, found.ulysses, found.checkpoint) == (8, 4, "auto")
    more = {"seq_len": 3 * 2**20, "ulysses": 2, "gradient_accumulation_steps": 2}
    said = report(checkpoint="none", **more).splitlines()[3]
    words = said.split("To change: ")[1].split(" is predicted")[0].split()
    found = parse_settings([*required, *words])
    replicas = 4 // (found.ulysses * found.ring)
    assert found.gradient_accumulation_steps * replicas == 4, "the rows of a step are the same"
    said = report(num_gpus=1, ulysses=1, checkpoint="none")
    assert "--states-on-host" not in said
    assert "and fsdp_offload_params: true in accelerate.yaml is predicted" in said


@pytest.mark.usefixtures("on_h200")
def test_where_nothing_fits_the_longest_row_is_named() -> None:
    said = report(checkpoint="auto", seq_len=2**23)
    assert re.search(r"predicted to fit on 4xH200 has \d,\d{3},\d{3} tokens", said)
    assert "--seq-len" in said


@pytest.mark.usefixtures("on_h200")
def test_models_that_are_not_covered_still_say_what_was_used() -> None:
    said = report(config=GptOssConfig(num_local_experts=8))
    assert "Used: tensors held" in said
    assert "Nothing was predicted: model m: num_local_experts=8" in said


@pytest.mark.usefixtures("on_h200")
def test_what_is_not_predicted_is_said_with_what_to_change() -> None:
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=4)
    said = str(memory_report.out_of_memory("Full.", settings(), SHAPE, accelerator, "pairs aren't"))
    assert "Used: tensors held 120.0 GiB" in said
    assert "Nothing was predicted: pairs aren't. To change: --checkpoint offload" in said


@pytest.fixture
def run(start: Start, config_file: Path) -> Start:
    """A run of a model of four layers."""
    config_file.write_text(json.dumps(TINY_LLAMA | {"num_hidden_layers": 4}))
    return partial(start, "--full", seq_len=32, max_steps=2, scheduler="constant")


def test_the_recipe_rehearses_a_step(monkeypatch: pytest.MonkeyPatch, run: Start) -> None:
    """A run with a rehearsal has the losses of a run without."""
    found, told = list[Any](), list[Any]()
    rehearse = rehearsal.preflight

    def metered(handle: Any, *given: Any, **options: Any) -> Any:
        meter = LiveBytes(10**12)
        handle._checkpoints.find_meter = lambda _: meter
        found.append(rehearse(handle, *given, **options))
        told.append(options)
        handle._checkpoints.find_meter = lambda _: None
        return found[-1]

    monkeypatch.setattr(rehearsal, "preflight", metered)
    with_one, without = run(save_every=2), run("--skip-rehearsal", folder="without")
    assert numbers(with_one) == numbers(without)
    run("--resume", save_every=2, max_steps=3)
    run(folder="accumulated", gradient_accumulation_steps=2)
    assert [options["has_optimizer_states"] for options in told] == [False, True, False]
    assert [options["num_forwards"] for options in told] == [1, 1, 2]
    assert found[0].policy == "attention"
    assert found[2].expected_bytes > found[0].expected_bytes


def test_the_recipe_raises_it(monkeypatch: pytest.MonkeyPatch, run: Start) -> None:
    def full(*_: object, **__: object) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def said(text: str, _: Settings, config: Any, *__: Any) -> RuntimeError:
        assert text == "CUDA out of memory."
        assert config.num_hidden_layers == 4
        return memory_report.OutOfMemory("Predicted: ...")

    monkeypatch.setattr(text_trainer, "run_batches", full)
    monkeypatch.setattr(memory_report, "out_of_memory", said)
    with pytest.raises(memory_report.OutOfMemory, match="Predicted"):
        run()


def test_recurrent_layers_run_as_the_settings_say() -> None:
    """With kept shares of attention rings need a layout that isn't striped. What torch's functions
    keep of a recurrence is not predicted."""
    config, cluster = model_config("qwen3.5-9b", 8, 131072), parse_cluster("4xH200")

    def predicted(**values: Any) -> Any:
        return memory_report.predict_run(settings(**values), config, cluster)

    heads, states = (predicted(recurrent_exchange=way) for way in ("heads", "states"))
    assert heads.candidate.recurrence.way == "heads"
    assert states.candidate.recurrence.way == "states"
    ring = {"ulysses": 1, "ring": 4}
    shares = {
        layout: predicted(**ring, layout=layout).candidate.recurrence.mapped_share
        for layout in ("contiguous", "zigzag")
    }
    assert shares == {"contiguous": 1, "zigzag": 1}
    kept = predicted(**ring, layout="zigzag", checkpoint="attention", attention_kept=0.5)
    assert kept.candidate.setting.layout == "zigzag"
    with pytest.raises(ValueError, match="torch_recurrence=True: what torch's functions keep"):
        predicted(torch_recurrence=True)


def test_gradients_stay_from_one_forward_of_a_step_to_the_next() -> None:
    """A run that accumulates holds a quarter of them on each of four GPUs, in float32."""
    cluster = parse_cluster("4xH200")
    once, twice = (
        memory_report.predict_run(
            settings(checkpoint="none", gradient_accumulation_steps=forwards), SHAPE, cluster
        )
        for forwards in (1, 2)
    )
    assert twice.memory.total - once.memory.total == pytest.approx(once.job.shape.num_weights)
    assert (once.num_rows, twice.num_rows, twice.forwards) == (1, 2, 2)
    assert twice.time.attention == pytest.approx(2 * once.time.attention)
