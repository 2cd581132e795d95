"""What the stock model says of rows, from its whole logits on one process; and patched copies of it
on virtual ranks."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from longctx_patch import LongContextConfig, PatchHandle, patch, run_virtual_ranks, virtual_group
from longctx_patch.transport import VirtualTransport
from tests.hf.tiny import VOCABULARY

Found = TypeVar("Found")

WAYS: dict[str, dict[str, int]] = {
    "one rank": {},
    "ring": {"ring_degree": 2},
    "ulysses": {"ulysses_degree": 2},
    "both": {"ring_degree": 2, "ulysses_degree": 2},
    "ring of 4": {"ring_degree": 4},
}


def document(length: int, number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()


@torch.no_grad()
def stock_logs(model: Any, ids: list[int] | Tensor) -> Tensor:
    """`[L - 1, V]` log-probabilities of each next token of a document."""
    row = torch.as_tensor(ids)[None]
    return model.eval()(input_ids=row, use_cache=False).logits[0, :-1].log_softmax(-1)


def stock_log_probs(model: Any, ids: list[int] | Tensor) -> Tensor:
    """`[L - 1]`, of the tokens that the document has."""
    wanted = torch.as_tensor(ids)[1:, None]
    return stock_logs(model, ids).gather(1, wanted)[:, 0]


def on_virtual_ranks(
    model: Any, way: dict[str, int], run: Callable[[PatchHandle], Found]
) -> list[Found]:
    """What each rank finds with a patched copy of the model."""
    config = LongContextConfig(**way)  # type: ignore[arg-type]
    copies = [copy.deepcopy(model) for _ in range(config.sequence_degree)]

    def on_one_rank(transport: VirtualTransport) -> Found:
        group = virtual_group(transport, config)
        return run(patch(copies[transport.group_rank], config, group=group))

    return run_virtual_ranks(config.sequence_degree, on_one_rank)
