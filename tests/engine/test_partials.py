"""Partial results that a rank holds: packets are sent on, and little is copied."""

import pytest
import torch

from longctx_patch.engine.accumulate import RowSum
from longctx_patch.engine.partials import Partial
from longctx_patch.plans import Operand
from longctx_patch.sequence.layout import Interval, Rows
from longctx_patch.transport import Packet, TensorSpec

SHAPE = (1, 6, 2, 4)
ROWS = Rows.first(6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_that_came_goes_on_in_its_packet(dtype: torch.dtype) -> None:
    like = (torch.zeros(SHAPE, dtype=dtype),) * 2
    wide = torch.promote_types(dtype, torch.float32)
    arrived = Packet.empty([TensorSpec(SHAPE, wide)] * 2, torch.device("cpu"))
    for view in arrived.tensors:
        view.fill_(1.0)
    specs = [TensorSpec(SHAPE, dtype)] * 2
    held = Partial(ROWS, RowSum(specs, torch.device("cpu")))
    held.adopt(arrived)
    part = tuple(torch.full_like(tensor, 2.0) for tensor in like)
    held.add([Interval(0, 4)], tuple(x[:, :4] for x in part))
    held.add([Interval(3, 6)], tuple(x[:, 3:] for x in part))
    packet = held.packet(Operand.DKV_SUM)
    assert packet is arrived
    for view in packet.tensors:
        assert view[0, :, 0, 0].tolist() == [3, 3, 3, 5, 3, 3]
