"""The softmax merge of two attention partials in one pass over memory, with Triton.

Per number of the total it reads both parts and writes once: 10 bytes for a bfloat16 part that joins
a float32 total in place, 8 for two bfloat16 parts. PyTorch's own operators take several passes,
since a part is converted, or zeros are filled in, before anything is merged.

Triton is imported here, so this module is imported only where it is used (`accumulate.py`). Each
number is computed by one program in a fixed order, so the same inputs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longctx_patch.sequence.layout import Interval

Part = tuple[Interval, tuple[Tensor, ...]]
"""(rows of the whole, (lse_BLH, out_BLHD) of these rows). out is bfloat16, float16 or float32 and
has D contiguous, lse is float32; other strides are free."""

_NUMBERS_PER_PROGRAM = 2048
"""Numbers of out: 16 for each of 128 threads, which keeps enough reads in flight."""


def merge(total: Part, old: Part, new: Part) -> None:
    """Write the merge of `old` and `new` to all rows of `total`, in float32.

    A row that neither part has gets out 0 and lse -inf. The memory of `total` may be that of the
    same rows of a part, if dtype and strides are the same too.
    """
    rows, (_, out_BLHD) = total
    batch, _, heads, dim = out_BLHD.shape
    cols = triton.next_power_of_2(dim)
    block = max(1, _NUMBERS_PER_PROGRAM // cols)
    arguments = [argument for part in (total, old, new) for argument in _arguments(part)]
    with torch.cuda.device_of(out_BLHD):  # Triton launches on the current device
        _merge[triton.cdiv(rows.size, block), heads, batch](
            *arguments, D=dim, ROWS=block, COLS=cols, num_warps=4
        )


def _arguments(part: Part) -> list[Tensor | int]:
    rows, (lse_BLH, out_BLHD) = part
    strides = out_BLHD.stride()[:3], lse_BLH.stride()
    return [out_BLHD, *strides[0], lse_BLH, *strides[1], rows.start, rows.stop]


@triton.jit
def _weighed(a: tl.tensor, x: tl.tensor, b: tl.tensor, y: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(lse, out) of rows with log-sum-exps a and b and outputs x and y."""
    # One u = exp(-|b - a|) is enough: logaddexp(a, b) is max(a, b) + log(1 + u), and sigmoid(b - a)
    # is 1 or u over 1 + u. Nothing overflows, NaN stays NaN. Where neither has a key, b weighs 0.
    neither = (a == float("-inf")) & (b == float("-inf"))
    difference = tl.where(neither, float("-inf"), b - a)
    u = tl.exp(-tl.abs(difference))
    lse = tl.maximum(a, b) + tl.log(1.0 + u)
    weight = tl.div_rn(tl.where(difference > 0.0, 1.0, u), 1.0 + u)[:, None]
    # As torch.lerp: from the nearer side, so that a weight of 1 gives y itself.
    out = tl.where(weight < 0.5, x + weight * (y - x), y - (1.0 - weight) * (y - x))
    return lse, out


# Triton may specialise on the alignment of out, which decides how wide memory accesses are. Other
# arguments that change from call to call must not have the kernel compiled again.
@triton.jit(
    do_not_specialize=[
        f"{part}_{name}"
        for part in ("total", "old", "new")
        for name in ("lse", "lse_b", "lse_l", "lse_h", "start", "stop")
    ]
)
def _merge(
    total_out: tl.tensor,
    total_b: tl.tensor,
    total_l: tl.tensor,
    total_h: tl.tensor,
    total_lse: tl.tensor,
    total_lse_b: tl.tensor,
    total_lse_l: tl.tensor,
    total_lse_h: tl.tensor,
    total_start: tl.tensor,
    total_stop: tl.tensor,
    old_out: tl.tensor,
    old_b: tl.tensor,
    old_l: tl.tensor,
    old_h: tl.tensor,
    old_lse: tl.tensor,
    old_lse_b: tl.tensor,
    old_lse_l: tl.tensor,
    old_lse_h: tl.tensor,
    old_start: tl.tensor,
    old_stop: tl.tensor,
    new_out: tl.tensor,
    new_b: tl.tensor,
    new_l: tl.tensor,
    new_h: tl.tensor,
    new_lse: tl.tensor,
    new_lse_b: tl.tensor,
    new_lse_l: tl.tensor,
    new_lse_h: tl.tensor,
    new_start: tl.tensor,
    new_stop: tl.tensor,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """ROWS rows of one head; `_b`, `_l` and `_h` are strides."""
    # In int64, since tensors may have more than 2^31 numbers.
    row = total_start + (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    here = row < total_stop
    in_old = here & (row >= old_start) & (row < old_stop)
    in_new = here & (row >= new_start) & (row < new_stop)
    col = tl.arange(0, COLS)[None, :]
    in_row = col < D
    a_lse = old_lse + batch * old_lse_b + (row - old_start) * old_lse_l + head * old_lse_h
    b_lse = new_lse + batch * new_lse_b + (row - new_start) * new_lse_l + head * new_lse_h
    a_out = old_out + batch * old_b + (row - old_start) * old_l + head * old_h
    b_out = new_out + batch * new_b + (row - new_start) * new_l + head * new_h
    a = tl.load(a_lse, in_old, float("-inf"))
    b = tl.load(b_lse, in_new, float("-inf"))
    x = tl.load(a_out[:, None] + col, in_old[:, None] & in_row, 0.0).to(tl.float32)
    y = tl.load(b_out[:, None] + col, in_new[:, None] & in_row, 0.0).to(tl.float32)
    lse, out = _weighed(a, x, b, y)
    # Threads may read the same numbers, which `total` may overwrite: all read before one writes.
    tl.debug_barrier()
    to_lse = total_lse + batch * total_lse_b + (row - total_start) * total_lse_l
    to_out = total_out + batch * total_b + (row - total_start) * total_l + head * total_h
    tl.store(to_lse + head * total_lse_h, lse, here)
    tl.store(to_out[:, None] + col, out, here[:, None] & in_row)
