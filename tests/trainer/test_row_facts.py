"""What ranks compare of rows: alike in every process, and different where rows are."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from longctx_patch.trainer.watching import row_facts


def made(kind: str, value: int) -> Any:
    numbers = np.full((3, 2, 3), value, dtype=np.uint8)
    return {
        "text": f"w{value}",
        "ids": [1, value],
        "turns": [{"role": "user", "content": str(value)}],
        "picture": Image.fromarray(numbers),
        "array": numbers[:, ::-1],
        "tensor": torch.full((2000,), value).to(torch.bfloat16),
        "number": torch.tensor(value),
    }[kind]


@pytest.mark.parametrize("kind", ["text", "ids", "turns", "picture", "array", "tensor", "number"])
def test_rows_are_alike_if_their_values_are(kind: str) -> None:
    one, again, other = (repr(row_facts({"row": made(kind, n)})) for n in (3, 3, 4))
    assert one == again != other
    assert "0x" not in one


def test_of_other_objects_the_kind_is_left() -> None:
    row = {"source": object(), "mixed": np.array([object()])}
    assert row_facts(row) == {"source": "object", "mixed": "ndarray"}
