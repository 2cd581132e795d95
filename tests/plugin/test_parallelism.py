"""The mesh, batches and gradients of SP x DDP and SP x FSDP2, states on the host, and refusals."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader, IterableDataset

from longctx_patch.config import LongContextConfig
from longctx_patch.plugin import (
    SequenceParallelismConfig,
    accelerator,
    make_accelerator,
    states_on_host,
)
from longctx_patch.rules.launched import WORLD_VARIABLES
from tests.plugin.launched import run_launched

ONE = LongContextConfig()
TWO = LongContextConfig(ulysses_degree=2)
FOUR = LongContextConfig(ulysses_degree=2, ring_degree=2)
NUM_ROWS = 12
LAUNCHERS = ("ACCELERATE_", "PARALLELISM_CONFIG_", "FSDP_")


class Stream(IterableDataset[int]):
    """A dataset without a length, whose rows Accelerate would dispatch from rank 0."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_ROWS))


def _rows(acc: Accelerator, dataset: Any, shuffle: bool = False) -> list[int]:
    loader = acc.prepare(DataLoader(dataset, batch_size=2, shuffle=shuffle))
    return [int(row) for batch in loader for row in batch]


def _mean_gradient(acc: Accelerator) -> float:
    """Gradient of rank^2 * w after DDP: the mean of rank^2 over the ranks it averages."""
    model = acc.prepare(nn.Linear(1, 1, bias=False))
    acc.backward(model(torch.tensor([[float(acc.process_index**2)]])).sum())
    return float(model.module.weight.grad)


def _sharded_gradient(mesh: DeviceMesh, rank: int) -> tuple[list[float], int]:
    """That gradient under FSDP2 over `mesh`, and the number of weight rows on this rank."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(1, 8, bias=False)
    fully_shard(model, mesh=mesh)
    model(torch.tensor([[float(rank**2)]])).sum().backward()
    gradient: Any = model.weight.grad
    return gradient.full_tensor().flatten().tolist(), gradient.to_local().shape[0]


def _two_by_two() -> dict[str, Any]:
    acc = make_accelerator(TWO)
    mesh = acc.torch_device_mesh
    result = {
        "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        "rank": (mesh["dp_replicate"].get_local_rank(), mesh["cp"].get_local_rank()),
        "distributed_type": str(acc.distributed_type.value),
        "ordered": _rows(acc, range(NUM_ROWS)),
        "shuffled": _rows(acc, range(NUM_ROWS), shuffle=True),
        "streamed": _rows(acc, Stream()),
        "gradient": _mean_gradient(acc),
        "again": make_accelerator(TWO).torch_device_mesh is mesh,
    }
    for name, sizes in {"fsdp": (1, 2), "hsdp": (2, 1)}.items():
        pc = SequenceParallelismConfig(
            dp_replicate_size=sizes[0], dp_shard_size=sizes[1], cp_size=2
        )
        shard_mesh = pc.build_device_mesh("cpu")[tuple(pc.fsdp_dim_names)]
        result[name] = _sharded_gradient(shard_mesh, acc.process_index)
    return result


def test_two_groups_of_two() -> None:
    """The sequence axis is innermost; its ranks get the same rows, and replicas others; gradients
    are means over all ranks, and a second accelerator has the mesh of the first."""
    ranks = run_launched(_two_by_two, 4)
    assert [r["rank"] for r in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for kind in ("ordered", "shuffled", "streamed"):
        rows = [r[kind] for r in ranks]
        assert rows[0] == rows[1]
        assert rows[2] == rows[3]
        assert sorted(rows[0] + rows[2]) == list(range(NUM_ROWS))
    assert ranks[0]["shuffled"] + ranks[2]["shuffled"] != list(range(NUM_ROWS))
    for rank in ranks:
        assert rank["mesh"] == {"dp_replicate": 2, "cp": 2}
        assert rank["distributed_type"] == "MULTI_CPU"
        assert rank["again"]
        assert rank["gradient"] == (0 + 1 + 4 + 9) / 4
        # FSDP2 shards 8 rows over 4 ranks (2 each), HSDP over 2 ranks in two copies (4 each).
        assert (rank["fsdp"], rank["hsdp"]) == (([3.5] * 8, 2), ([3.5] * 8, 4))


# The tests below need one process.


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test without launcher, GPU and Accelerate state, and leave none."""
    launched = ("RANK", "LOCAL_RANK", *WORLD_VARIABLES)
    for name in [n for n in os.environ if n.startswith(LAUNCHERS) or n in launched]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_one_process_and_degree_one_is_plain_accelerate() -> None:
    acc = make_accelerator(LongContextConfig(), project_dir="somewhere")
    assert (acc.num_processes, acc.project_dir) == (1, "somewhere")
    assert acc.torch_device_mesh is None
    assert acc.dataloader_config.dispatch_batches is False


FSDP1 = FullyShardedDataParallelPlugin(fsdp_version=1)
SP = SequenceParallelismConfig


DISPATCHED = DataLoaderConfiguration(dispatch_batches=True)


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (
            FOUR,
            {},
            r"ulysses_degree=2 x ring_degree=2 = 4 .*but 1 process runs.*_type: MULTI_GPU"
            r".*num_processes: 4.*MULTI_CPU starts one process",
        ),
        (
            FOUR,
            {"WORLD_SIZE": "8", "dp_replicate_size": 3},
            r"=3 x dp_shard_size=1 x cp_size=4 = 12, but 8 .*dp_replicate_size=2 without",
        ),
        (
            TWO,
            {"WORLD_SIZE": "4", "dp_shard_size": 2},
            r"dp_shard_size=2 without FSDP2.*dp_replicate_size=2",
        ),
        (
            FOUR,
            {
                **{"WORLD_SIZE": "4", "PARALLELISM_CONFIG_CP_SIZE": "2"},
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            },
            r"cp_size: 2 in the YAML.*= 4:",
        ),
        (ONE, {"ACCELERATE_USE_FSDP": "true"}, r"fsdp_version=1: .*fsdp_version: 2"),
        (ONE, {"fsdp_plugin": FSDP1}, "fsdp_version=1"),
        (
            ONE,
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            r"FSDP on the CPU.*distributed_type: MULTI_GPU",
        ),
        (ONE, {"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED is on"),
        (ONE, {"dataloader_config": DISPATCHED}, r"batches=True: .*Use dispatch_batches=False"),
        (ONE, {"parallelism_config": SP()}, "parallelism_config was given"),
    ],
)
def test_refusals(
    config: LongContextConfig, given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names in capitals are variables that the launcher exports; the others are arguments."""
    for name in filter(str.isupper, given):
        monkeypatch.setenv(name, given[name])
    with pytest.raises(ValueError, match=message):
        make_accelerator(config, **{k: v for k, v in given.items() if not k.isupper()})


@pytest.mark.parametrize(
    ("sizes", "world", "fsdp2", "message"),
    [
        ({"dp_replicate_size": 4}, 4, True, "no ranks to shard over"),
        ({"tp_size": 2}, 2, False, r"tp_size=2: .*Use tp_size=1 and set cp_size"),
        ({"sp_size": 2}, 2, False, r"sp_size=2: .*Use sp_size=1 and set cp_size"),
        ({"cp_size": 0}, 1, False, r"cp_size=0: .*Use cp_size=1"),
    ],
)
def test_sizes_that_are_refused(
    sizes: dict[str, int], world: int, fsdp2: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SP(**sizes).check_world(world, fsdp2)


def test_accelerates_own_context_parallelism_stays_off() -> None:
    pc = SequenceParallelismConfig(cp_size=4, dp_shard_size=2)
    assert not pc.cp_enabled
    assert pc.cp_handler is None
    assert (pc.total_size, pc.data_parallel_size) == (8, 2)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_allocator_is_set_before_cuda_starts(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Started(Exception):
        pass

    def start(**_: Any) -> None:
        raise Started

    monkeypatch.setattr(accelerator, "_gpu_wanted", lambda: on_gpu)
    monkeypatch.setattr(accelerator, "let_segments_grow", lambda: calls.append("set"))
    monkeypatch.setattr(accelerator, "_Accelerator", start)
    with pytest.raises(Started):
        make_accelerator(LongContextConfig())
    assert calls == ["set"] * on_gpu


def test_an_earlier_accelerator_would_win() -> None:
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="an Accelerator exists already"):
        make_accelerator(LongContextConfig())


def test_earlier_state_with_another_world(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"announced 2 processes .* has 1"):
        make_accelerator(TWO)


@pytest.mark.parametrize(
    ("fsdp2", "given", "expected"),
    [
        (False, (None, None), (4, 1)),
        (True, (None, None), (1, 4)),
        (True, (2, None), (2, 2)),
        (True, (None, 2), (2, 2)),
        (True, (4, None), (4, 1)),
    ],
)
def test_remaining_ranks(
    fsdp2: bool, given: tuple[int | None, int | None], expected: tuple[int, int]
) -> None:
    pc = accelerator._parallelism(TWO, 8, fsdp2, *given)
    assert (pc.dp_replicate_size, pc.dp_shard_size, pc.cp_size) == (*expected, 2)
    pc.check_world(8, fsdp2)


def test_fsdp_reduces_in_float32_and_leaves_the_loss_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    plugin = accelerator._exact_fsdp_plugin({})
    plugin.set_mixed_precision("bf16")  # Accelerate does this, and must keep ours
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy.output_dtype is None
    assert accelerator._exact_fsdp_plugin({"mixed_precision": "no"}).mixed_precision_policy is None


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
