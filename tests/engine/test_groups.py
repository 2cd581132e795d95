"""Process groups of a sequence group."""

from datetime import timedelta

import torch
import torch.distributed as dist

from longctx_patch import LongContextConfig, make_sequence_group
from longctx_patch.transport import ProcessGroupTransport
from tests.plugin.launched import run_launched


def timeouts(seconds: int) -> set[float]:
    """Time limits of all groups, where the world has one of `seconds`."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    made = make_sequence_group(LongContextConfig(ring_degree=2))
    found = set()
    for transport in (made.everyone, made.ring_results):
        assert isinstance(transport, ProcessGroupTransport)
        backend = transport.group._get_backend(torch.device("cpu"))
        found.add(backend.options._timeout.total_seconds())
    return found


def test_groups_wait_as_long_as_the_world() -> None:
    """As the user said, with TrainingArguments(ddp_timeout=...) for example."""
    assert run_launched(timeouts, 2, 77) == [{77.0}, {77.0}]
