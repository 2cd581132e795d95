"""Each pass over the data takes every row once."""

import pytest

from longctx_patch.recipes.row_order import RowOrder, check_batch


def test_each_pass_takes_every_row_once_in_another_order() -> None:
    rows = [{"input_ids": [number, number]} for number in range(7)]
    order = RowOrder(rows=rows, replicas=1, batch_size=1, accumulation=1, seed=3)
    taken = [order.micro_batches(step, 0)[0][0]["input_ids"][0] for step in range(14)]
    assert sorted(taken[:7]) == sorted(taken[7:]) == list(range(7))
    assert taken[:7] != taken[7:]


def test_a_batch_of_more_rows_than_there_are_is_refused() -> None:
    check_batch("batch_size", 7, 7)
    with pytest.raises(ValueError, match=r"batch_size=1000000000: .*data has 7 in all.*Give 7 or"):
        check_batch("batch_size", 10**9, 7)
