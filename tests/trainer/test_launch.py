"""With the parallelism_config of a launch file a trainer trains as the stock trainer."""

import os
from pathlib import Path

from accelerate.utils.launch import prepare_multi_gpu_env

from longctx_patch.plugin import accelerate_yaml
from tests.plugin.launched import run_launched
from tests.plugin.test_yaml import launch_arguments
from tests.trainer.trained import Case, Trained, complaints, train, train_all

CASE = Case("launched", config={"ring_degree": 2})


def train_with(environment: dict[str, str], folder: str) -> Trained:
    """On each process, as a user's script does it."""
    os.environ.update(environment)
    return train(CASE, folder, is_patched=True)


def test_a_launch_file_sets_the_axis(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(accelerate_yaml(4, 2, fsdp=False, cpu=True, mixed_precision="no"))
    exported = prepare_multi_gpu_env(launch_arguments(file, "--main_process_port", "0"))
    kinds = ("ACCELERATE_", "PARALLELISM_CONFIG_")
    given = {name: value for name, value in exported.items() if name.startswith(kinds)}
    assert given["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    wanted = run_launched(train_all, 2, [CASE], str(tmp_path), False)[0][0]
    for found in run_launched(train_with, 4, given, str(tmp_path)):
        wrong = complaints(found, wanted)
        assert not wrong, "\n".join(wrong)
