"""What ranks hold of results: packets that go on, and how much is copied."""

import pytest
import torch

from longctx_patch.engine.partials import GradientPartial, OutPartial
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
    held = GradientPartial(ROWS, like)
    held.adopt(arrived)
    part = tuple(torch.full_like(tensor, 2.0) for tensor in like)
    held.add([Interval(0, 4)], tuple(x[:, :4] for x in part))
    held.add([Interval(3, 6)], tuple(x[:, 3:] for x in part))
    packet = held.packet(Operand.DKV_SUM)
    assert packet is arrived
    for view in packet.tensors:
        assert view[0, :, 0, 0].tolist() == [3, 3, 3, 5, 3, 3]


@pytest.mark.parametrize("operand", [Operand.DKV, Operand.DKV_SUM])
def test_sums_of_some_rows_are_packed_with_zeros_between(operand: Operand) -> None:
    like = (torch.zeros(SHAPE, dtype=torch.bfloat16),)
    held = GradientPartial(ROWS, like)
    ones = torch.ones(1, 4, 2, 4, dtype=torch.bfloat16)
    held.add([Interval(0, 1), Interval(2, 5)], (ones,))
    held.add([Interval(4, 5)], (ones[:, :1],))
    (packed,) = held.packet(operand).tensors
    assert packed.dtype == (torch.float32 if operand.is_sum else torch.bfloat16)
    assert packed[0, :, 0, 0].tolist() == [1, 0, 1, 1, 2, 0]


def test_out_is_packed_with_its_lse() -> None:
    held = OutPartial(ROWS, (torch.zeros(SHAPE, dtype=torch.bfloat16),))
    out = torch.full((1, 3, 2, 4), 5.0, dtype=torch.bfloat16)
    held.add([Interval(1, 4)], (torch.zeros(1, 3, 2), out))
    held.add([Interval(3, 4)], (torch.zeros(1, 1, 2), 3 * torch.ones_like(out[:, :1])))
    lse_BLH, out_BLHD = held.packet(Operand.OUT).tensors
    assert out_BLHD[0, :, 0, 0].tolist() == [0, 5, 5, 4, 0, 0]
    found = lse_BLH[0, :, 0]
    assert torch.equal(found.isinf(), torch.tensor([True, False, False, False, True, True]))
    torch.testing.assert_close(found[3], torch.tensor(2.0).log())
