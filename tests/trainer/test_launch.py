"""Scripts started by `accelerate launch` with a parallelism_config train as the stock trainer."""

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from longctx_patch.plugin import accelerate_yaml
from tests.launching import run_module
from tests.plugin.launched import run_launched
from tests.trainer.trained import Case, complaints, train, train_all

ROOT = Path(__file__).parents[2]
CASE = Case("launched", config={"ring_degree": 2}, arguments={"max_steps": 6})


def main(folder: Path) -> None:
    """What a user's script does, on each process."""
    found = train(CASE, str(folder), is_patched=True)
    (folder / f"{os.environ['RANK']}.run").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()  # gloo's threads may abort a process that ends with them


@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_launch_file_sets_the_axis(num_processes: int, tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(accelerate_yaml(num_processes, 2, fsdp=False, cpu=True, mixed_precision="no"))
    launch = ["accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0"]
    run_module(ROOT, *launch, "-m", "tests.trainer.test_launch", str(tmp_path))
    wanted = run_launched(train_all, num_processes // 2, [CASE], str(tmp_path), False)[0][0]
    for rank in range(num_processes):
        found = pickle.loads((tmp_path / f"{rank}.run").read_bytes())
        wrong = complaints(found, wanted)
        assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
