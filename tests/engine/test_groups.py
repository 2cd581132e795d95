"""Process groups of a sequence group."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from longctx_patch import LongContextConfig, SequenceGroup, make_sequence_group
from longctx_patch.transport import ProcessGroupTransport
from tests.harness import run_distributed


def timeouts(rank: int) -> None:
    """Groups have the time limit of the world, or the one that was given."""
    config, world = LongContextConfig(ring_degree=2), dist.group.WORLD
    assert world is not None
    with pytest.raises(ValueError, match=r"timeout=0:00:00: give a time above 0"):
        make_sequence_group(config, timeout=timedelta(0))
    given = make_sequence_group(config, timeout=timedelta(seconds=5))
    assert limits_of(given) == {5.0}
    assert limits_of(make_sequence_group(config)) == {limit_of(world)}


def limit_of(group: dist.ProcessGroup) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def limits_of(made: SequenceGroup) -> set[float]:
    found = set()
    for transport in (made.everyone, made.ring_results):
        assert isinstance(transport, ProcessGroupTransport)
        found.add(limit_of(transport.group))
    return found


def test_groups_wait_as_long_as_the_world_or_as_given() -> None:
    """As the user said, with TrainingArguments(ddp_timeout=...) for example."""
    run_distributed(timeouts, 2)
