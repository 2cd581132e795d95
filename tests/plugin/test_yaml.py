"""The YAML files are what the function writes, and `accelerate launch` takes them."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command_parser,
    multi_gpu_launcher,
)
from accelerate.utils.launch import prepare_multi_gpu_env

from longctx_patch.config import LongContextConfig
from longctx_patch.plugin import accelerate_yaml, accelerator
from tests.meeting import unused_port

RECIPES = Path(__file__).parents[2] / "recipes" / "accelerate"

# file name -> num_processes, sequence_degree, expected dp_shard, other arguments
FILES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "cpu_2_processes.yaml": (2, 2, 1, {"cpu": True, "mixed_precision": "no"}),
    "one_gpu_states_on_host.yaml": (1, 1, 1, {"fsdp": True, "states_on_host": True}),
    "one_node_4gpu_sp.yaml": (4, 4, 1, {}),
    "one_node_8gpu_sp.yaml": (8, 8, 1, {}),
    "one_node_8gpu_sp4_fsdp2.yaml": (8, 4, 2, {"fsdp": True}),
    "two_nodes_16gpu_sp8_fsdp2.yaml": (16, 8, 2, {"fsdp": True, "num_machines": 2}),
}


def launch_arguments(path: Path, *more: str) -> argparse.Namespace:
    """What `accelerate launch` reads of a file, and of flags."""
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(path), *more, "-m", "longctx_patch.recipes.finetune"]
    )
    return _validate_launch_command(arguments)[0]


def test_every_file_is_listed() -> None:
    assert sorted(path.name for path in RECIPES.glob("*.yaml")) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_file_is_the_functions_output_under_a_comment(name: str) -> None:
    """The file is the function's output under a comment; `accelerate launch` knows its keys."""
    text = (RECIPES / name).read_text(encoding="utf-8")
    num_processes, degree, _, others = FILES[name]
    written = accelerate_yaml(num_processes, degree, **{"fsdp": False} | others)
    assert text.endswith(written)
    head = text.removesuffix(written)
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"accelerate launch --config_file recipes/accelerate/{name}" in head
    assert "-m longctx_patch.recipes.finetune" in head
    assert "Change: " in head
    load_config_from_file(str(RECIPES / name))  # raises for unknown keys at the top
    known = vars(launch_command_parser().parse_args(["script.py"]))
    settings = yaml.safe_load(text)
    for part in ("fsdp_config", "parallelism_config"):
        for key in settings.get(part, {}):
            assert key in known, f"{key}: accelerate launch has no such setting"


@pytest.mark.parametrize("name", FILES)
def test_what_the_launcher_exports_is_what_we_need(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_processes, degree, dp_shard, others = FILES[name]
    fsdp = others.get("fsdp", False)
    arguments = launch_arguments(RECIPES / name)
    assert arguments.num_processes == num_processes
    assert arguments.multi_gpu is not fsdp
    arguments.main_process_port = 0  # the default port may be taken
    exported = prepare_multi_gpu_env(arguments)
    for key in ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_"):
        for variable in [v for v in exported if v.startswith(key)]:
            monkeypatch.setenv(variable, exported[variable])
    config = LongContextConfig(ulysses_degree=degree)
    fsdp2 = accelerator._uses_fsdp2(None, cpu=False)
    assert fsdp2 is fsdp
    launched = accelerator.launched_sizes(config, None, None)
    pc = accelerator._parallelism(config, arguments.num_processes, fsdp2, *launched)
    pc.check_world(arguments.num_processes, fsdp2)
    assert (pc.dp_replicate_size, pc.dp_shard_size, pc.cp_size) == (1, dp_shard, degree)
    if fsdp2:
        on_host = bool(others.get("states_on_host"))
        assert exported["FSDP_OFFLOAD_PARAMS"] == str(on_host).lower()
        assert exported["FSDP_ACTIVATION_CHECKPOINTING"] == "false"
        assert exported["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"
        assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in exported


def test_two_machines_need_a_name_and_the_command_line_wins() -> None:
    """The launcher refuses the placeholder in the file before it waits for other machines."""
    path = RECIPES / "two_nodes_16gpu_sp8_fsdp2.yaml"
    arguments = launch_arguments(path, "--machine_rank", "1", "--main_process_ip", "127.0.0.1")
    assert (arguments.machine_rank, arguments.main_process_ip) == (1, "127.0.0.1")
    with pytest.raises(ValueError, match="'<main_process_ip is the name or address of machine 0>"):
        multi_gpu_launcher(launch_arguments(path, "--machine_rank", "1"))


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, r"Timed out after \d+ seconds waiting for clients. 1/2 clients joined"),
        (1, r"timed out after 1000ms while trying to connect to \(127.0.0.1"),
    ],
)
def test_a_machine_that_never_comes_ends_the_wait(rank: int, said: str) -> None:
    path = RECIPES / "two_nodes_16gpu_sp8_fsdp2.yaml"
    asked = ["--machine_rank", str(rank), "--rdzv_conf", "timeout=1"]
    asked += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(unused_port())]
    with pytest.raises(RuntimeError, match=said):
        multi_gpu_launcher(launch_arguments(path, *asked))


def test_data_parallel_beside_the_sequence_and_a_lone_process() -> None:
    settings = yaml.safe_load(accelerate_yaml(8, 2, fsdp=False))
    assert settings["parallelism_config"] == {
        "parallelism_config_cp_size": 2,
        "parallelism_config_dp_replicate_size": 4,
        "parallelism_config_dp_shard_size": 1,
    }
    alone = accelerate_yaml(1, 1, fsdp=False, cpu=True, mixed_precision="no")
    assert not alone.startswith("#")
    assert yaml.safe_load(alone)["use_cpu"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_processes": 0, "sequence_degree": 1}, "num_processes=0.*1 or more"),
        ({"num_processes": 3, "sequence_degree": 3, "num_machines": 2}, "num_machines=2"),
        ({"num_processes": 2, "sequence_degree": 2, "fsdp": True, "cpu": True}, "Use fsdp=False"),
        ({"num_processes": 2, "sequence_degree": 2, "states_on_host": True}, "Use fsdp=True"),
        ({"num_processes": 1, "sequence_degree": 1, "mixed_precision": "int8"}, "'int8': choose"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accelerate_yaml(**{"fsdp": False} | arguments)  # type: ignore[arg-type]
