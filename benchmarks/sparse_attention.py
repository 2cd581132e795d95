"""How wrong would DeepSeek sparse attention be? `benchmarks/sparse_attention.py [MODEL_TYPE]`

There an indexer picks the keys that each token attends to. A rank has the indexer's keys of its own
tokens alone, and the attention over ranks takes no picks. This runs a tiny model past its refusal
on two virtual ranks: each indexer picks among the tokens of its rank, and attention drops the
picks. It prints the relative errors of loss and gradients against the stock model, and the share of
the stock model's picks that the ranks don't make. The refusal of these families rests on it
(docs/explanation/masks.md).
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from survey_families import as_if_supported, errors, rows, stock_step, tiny_model

from longctx_patch import LongContextConfig, patch, run_virtual_ranks, virtual_group
from longctx_patch.hf.call import sharded
from longctx_patch.hf.model.transformers_api import CALL_KEY
from longctx_patch.transport import VirtualTransport
from longctx_patch.verification.shrink import keep_float64
from tests.hf.float64 import backward

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
NUM_RANKS = 2
Picks = dict[tuple[str, int, int], set[int]]
"""(layer, row, position of a token) -> positions of the keys that were picked for it."""


class Measured(NamedTuple):
    """What a run past the refusal gives."""

    loss: float
    """Relative error, as of the gradients."""
    gradients: float
    """The worst of all parameters'."""
    picks: float
    """Share of the stock model's picks that the ranks don't make."""


def measure(model_type: str) -> Measured:
    exact, wanted = (
        stock_step(lambda: tiny_model(model_type), torch.float64),
        stock_picks(model_type),
    )
    ranks = patched(model_type)
    found = errors([step for step, _ in ranks], exact)
    made: Picks = {key: keys for _, picks in ranks for key, keys in picks.items()}
    missed = sum(len(keys - made[key]) for key, keys in wanted.items())
    return Measured(
        loss=found.pop("loss"),
        gradients=max(found.values()),
        picks=missed / sum(map(len, wanted.values())),
    )


def stock_picks(model_type: str) -> Picks:
    model = tiny_model(model_type)
    keep_float64(model)
    length = rows()["input_ids"].shape[1]
    picks: Picks = {}
    watch(model, torch.arange(length), picks)
    with torch.no_grad():
        model(**rows(), use_cache=False)
    return picks


def patched(model_type: str) -> list[tuple[dict[str, Tensor], Picks]]:
    """Of each rank loss and gradients, and the picks for its tokens."""
    models = [tiny_model(model_type) for _ in range(NUM_RANKS)]
    for model in models:
        keep_float64(model)
    config = LongContextConfig(ring_degree=NUM_RANKS, loss="logits")

    def on_one_rank(transport: VirtualTransport) -> tuple[dict[str, Tensor], Picks]:
        model = models[transport.group_rank]
        patch(model, config, group=virtual_group(transport, config))
        picks: Picks = {}
        let_through(model, picks)
        return backward(model(**rows(), use_cache=False).loss, model), picks

    dropped = sharded.KNOWN_TO_LAYERS | {"indices"}
    with as_if_supported(model_type), mock.patch.object(sharded, "KNOWN_TO_LAYERS", dropped):
        return run_virtual_ranks(NUM_RANKS, on_one_rank)


def indexers(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if name.endswith(".indexer")}


def watch(model: nn.Module, positions: Tensor, picks: Picks) -> None:
    """Note what each indexer picks, for tokens at these positions."""
    for name, indexer in indexers(model).items():
        indexer.register_forward_hook(
            lambda _, __, found, name=name: picks.update(picked(name, found, positions))
        )


def picked(name: str, found: Tensor, positions: Tensor) -> Picks:
    """Later tokens fill up the picks of the first ones, and are no picks."""
    keys = positions[found.long()].tolist()
    return {
        (name, row, token): {key for key in of_token if key <= token}
        for row, of_row in enumerate(keys)
        for token, of_token in zip(positions.tolist(), of_row, strict=True)
    }


def let_through(model: nn.Module, picks: Picks) -> None:
    """Give each indexer a causal mask of its rank's tokens, in place of the empty one that the call
    brings, and note its picks."""
    for name, indexer in indexers(model).items():
        attention: Any = model.get_submodule(name.removesuffix(".indexer"))
        held: list[Tensor] = []

        def note(_: Any, __: Any, kwargs: Any, held: list[Tensor] = held) -> None:
            held[:] = [getattr(kwargs["attention_mask"], CALL_KEY).positions]

        def mask(_: Any, args: tuple[Any, ...], held: list[Tensor] = held) -> tuple[Any, ...]:
            (positions,) = held
            hidden = positions[None, :] > positions[:, None]
            own = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None]
            return (*args[:3], own, *args[4:])

        def watched(
            _: Any, __: Any, found: Tensor, name: str = name, held: list[Tensor] = held
        ) -> None:
            picks.update(picked(name, found, held[0]))

        attention.register_forward_pre_hook(note, with_kwargs=True)
        indexer.register_forward_pre_hook(mask)
        indexer.register_forward_hook(watched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model_types", nargs="*", default=FAMILIES)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for model_type in parser.parse_args().model_types:
        loss, gradients, picks = measure(model_type)
        print(f"{model_type}: loss {loss:.1e}, gradients {gradients:.1e}, {picks:.0%} of picks")


if __name__ == "__main__":
    main()
