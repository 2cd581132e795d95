"""An evaluation holds what one layer needs: nothing of a whole row is as wide as the vocabulary or
an MLP, and no layer leaves anything behind, so that more layers take no more."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longctx_patch import LongContextConfig, PatchHandle, patch, run_virtual_ranks, virtual_group
from longctx_patch.evaluation.row_scorer import RowScorer, batch_of
from longctx_patch.loss import token_log_probs as tiles
from longctx_patch.transport import VirtualTransport
from tests.evaluation.stock import document
from tests.hf.tiny import VOCABULARY, featured_model

LENGTH, WIDTH = 512, 144


class Made(TorchDispatchMode):
    """The most rows of tensors by their width, and the most bytes of tensors held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, int] = {}
        self.peak_bytes = 0
        self._alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **kwargs or {})
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim:
                width = leaf.shape[-1]
                self.rows[width] = max(self.rows.get(width, 0), leaf.numel() // max(width, 1))
                self._alive.append(weakref.ref(leaf))
        held = [tensor.untyped_storage() for ref in self._alive if (tensor := ref()) is not None]
        self._alive = [ref for ref in self._alive if ref() is not None]
        storages = {storage.data_ptr(): storage.nbytes() for storage in held}
        self.peak_bytes = max(self.peak_bytes, sum(storages.values()))
        return made


def made_of(num_layers: int) -> list[Made]:
    """By two ranks, without what they hold of weights."""
    config = LongContextConfig(ring_degree=2, mlp_tiles=8)

    def on_one_rank(transport: VirtualTransport) -> Made:
        model = featured_model("llama", num_hidden_layers=num_layers, intermediate_size=WIDTH)
        handle: PatchHandle = patch(model, config, group=virtual_group(transport, config))
        batch = batch_of([document(LENGTH, 1)])
        with Made() as made:
            RowScorer(handle).over([batch], lambda _, scores: float(scores.log_probs.sum()))
        assert handle.mlp_tiles == (8,) * num_layers
        return made

    return run_virtual_ranks(2, on_one_rank)


def test_memory_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_BYTES", 16 * 4 * VOCABULARY)
    for two, six in zip(made_of(2), made_of(6), strict=True):
        for made in (two, six):
            assert made.rows[VOCABULARY] <= 64  # the transposed weight of the head
            assert made.rows[WIDTH] <= max(LENGTH // 2 // 8, 64)
        assert six.peak_bytes <= 1.02 * two.peak_bytes
        rows_bytes = 4 * 64 * LENGTH // 2
        assert two.peak_bytes < 16 * rows_bytes, two.peak_bytes / rows_bytes
    assert torch.is_grad_enabled()
