"""What ranks compare of a row of a dataset: plain values as they are, pictures and arrays by a
digest of their numbers."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (str, bytes, bool, int, float, complex, type(None))


def row_facts(row: Any) -> Any:
    """A row with everything replaced that would look different in another process: its `repr` is
    the same wherever the row is. Of objects that nothing is known of, only the kind is left.

    Example:
        >>> row_facts({"text": "a", "source": object()})
        {'text': 'a', 'source': 'object'}
    """
    if isinstance(row, _PLAIN):
        return row
    if isinstance(row, Mapping):
        return {name: row_facts(value) for name, value in row.items()}
    if isinstance(row, list | tuple):
        return [row_facts(value) for value in row]
    kind = type(row).__name__
    if isinstance(row, Tensor):
        flat = row.detach().cpu().contiguous().reshape(-1)
        return f"{kind} {list(row.shape)} {row.dtype} {_digest(flat.view(torch.uint8).numpy())}"
    if not hasattr(row, "__array_interface__"):  # arrays have it, and pictures of PIL
        return kind
    numbers = np.ascontiguousarray(row)
    return kind if numbers.dtype.hasobject else f"{kind} {numbers.shape} {_digest(numbers)}"


def _digest(numbers: np.ndarray) -> str:
    return blake2b(numbers.tobytes(), digest_size=8).hexdigest()
