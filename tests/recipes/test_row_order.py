"""Each pass over the data takes every row once."""

from longctx_patch.recipes.row_order import RowOrder


def test_each_pass_takes_every_row_once_in_another_order() -> None:
    rows = [{"input_ids": [number, number]} for number in range(7)]
    order = RowOrder(rows=rows, replicas=1, batch_size=1, accumulation=1, seed=3)
    taken = [order.micro_batches(step, 0)[0][0]["input_ids"][0] for step in range(14)]
    assert sorted(taken[:7]) == sorted(taken[7:]) == list(range(7))
    assert taken[:7] != taken[7:]
