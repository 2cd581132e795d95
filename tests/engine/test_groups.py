"""Process groups of a sequence group."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from longctx_patch import LongContextConfig, SequenceGroup, make_sequence_group
from longctx_patch.transport import ProcessGroupTransport
from tests.plugin.launched import run_launched


def timeouts(seconds: int) -> list[set[float]]:
    """Time limits of all groups, where the world has one of `seconds`: the usual ones, and those
    that were given."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    config = LongContextConfig(ring_degree=2)
    with pytest.raises(ValueError, match=r"timeout=0:00:00: give a time above 0"):
        make_sequence_group(config, timeout=timedelta(0))
    given = make_sequence_group(config, timeout=timedelta(seconds=5))
    return [limits_of(made) for made in (make_sequence_group(config), given)]


def limits_of(made: SequenceGroup) -> set[float]:
    found = set()
    for transport in (made.everyone, made.ring_results):
        assert isinstance(transport, ProcessGroupTransport)
        backend = transport.group._get_backend(torch.device("cpu"))
        found.add(backend.options._timeout.total_seconds())
    return found


def test_groups_wait_as_long_as_the_world_or_as_given() -> None:
    """As the user said, with TrainingArguments(ddp_timeout=...) for example."""
    assert run_launched(timeouts, 2, 77) == [[{77.0}, {5.0}]] * 2
