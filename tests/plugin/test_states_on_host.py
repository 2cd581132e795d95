"""Whether FSDP2 keeps states on the host, and the cores that the optimizer gets there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy

from longctx_patch.plugin import accelerator, states_on_host


@pytest.mark.parametrize("is_fsdp2", [False, True])
@pytest.mark.parametrize("moved", [False, True])
def test_states_on_host(is_fsdp2: bool, moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are on the host only under FSDP2, if the launcher exports offloading."""
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", str(moved).lower())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) is moved
    fake: Any = SimpleNamespace(is_fsdp2=is_fsdp2, state=SimpleNamespace(fsdp_plugin=plugin))
    assert states_on_host(fake) is (is_fsdp2 and moved)


@pytest.mark.parametrize(
    ("threads", "processes", "found"),
    [(1, "4", 4), (1, "1", 16), (1, "32", 1), (6, "4", 6), (1, None, 1)],
)
def test_processes_share_the_cores(
    threads: int, processes: str | None, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes share 16 cores. A number of threads that the user has set stays, and so does
    torch's default where the number of processes is unknown."""
    monkeypatch.setattr(accelerator, "num_cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    taken = [threads]
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    if processes is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setattr(accelerator, "states_on_host", lambda _: True)
    accelerator._share_cores(SimpleNamespace())
    assert taken[-1] == found
