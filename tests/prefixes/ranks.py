"""A patched model of several ranks on rows that begin alike, compared with the rows apart."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx_patch import LongContextConfig, PatchHandle
from longctx_patch.hf.model.transformers_api import decoder_layers
from longctx_patch.plans.traffic import Traffic
from tests.hf.float64 import in_float64
from tests.hf.steps import Step, complaints, on_ranks, reduced
from tests.hf.tiny import featured_model, gradients
from tests.prefixes.batches import Shared, Wanted, weighted
from tests.reference import relative_error

BOUNDS = {"float64": 1e-10, "float32": 1e-5}


class Ran(NamedTuple):
    """What a rank has."""

    values: Tensor | None
    """Log-probabilities or logits of whole rows."""
    step: Step
    tokens: int
    """How many of them went through its first layer."""


def model_of(family: str, dtype: str) -> Any:
    return in_float64(family) if dtype == "float64" else featured_model(family)


def sharing(**options: Any) -> LongContextConfig:
    return LongContextConfig(share_prefixes="always", **options)


def of_log_probs(model: Any, handle: PatchHandle, batch: Shared) -> tuple[Tensor, Tensor]:
    values = handle.token_log_probs(batch.given)
    return weighted(values, batch), values


def of_loss(model: Any, handle: PatchHandle, batch: Shared) -> tuple[Tensor, None]:
    return model(**batch.given).loss, None


def of_logits(model: Any, handle: PatchHandle, batch: Shared) -> tuple[Tensor, Tensor]:
    """Logits of all columns, of which a loss by hand is made."""
    given = {name: value for name, value in batch.given.items() if name != "labels"}
    logits = model(**given).logits
    labels = batch.given["labels"][:, 1:]
    chosen = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return weighted(chosen * (labels != -100), batch), logits


WAYS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "log_probs": of_log_probs,
    "loss": of_loss,
    "logits": of_logits,
}


def check_traffic(handle: PatchHandle) -> None:
    """The step has sent what its plans say, to the byte."""
    first, sent = handle.first_step, handle.counters
    if handle.config.sequence_degree > 1:
        assert first is not None
        assert first.backward_problem() is None
        planned = first.planned_forward() + first.planned_backward()
        assert planned == Traffic(sent.messages, sent.bytes)


def run_on_ranks(
    model: Any, batch: Shared, config: LongContextConfig, way: str = "log_probs"
) -> list[Ran]:
    def run(mine: Any, handle: PatchHandle) -> Ran:
        tokens: list[int] = []
        layer = decoder_layers(mine)[0]
        hook = layer.register_forward_pre_hook(
            lambda _, args, kwargs: tokens.append(
                (args[0] if args else kwargs["hidden_states"]).shape[:2].numel()
            ),
            with_kwargs=True,
        )
        loss, values = WAYS[way](mine, handle, batch)
        hook.remove()
        loss.backward()
        check_traffic(handle)
        values = None if values is None else values.detach()
        return Ran(values, Step(loss.detach(), gradients(mine)), sum(tokens))

    return on_ranks(model, config, run)


def differences(ranks: list[Ran], wanted: Wanted, way: str, bound: float) -> list[str]:
    """What ranks have that rows apart don't, in words."""
    first = ranks[0].values
    expected = {"log_probs": wanted.log_probs, "logits": wanted.logits}.get(way)
    wrong = []
    if first is not None and expected is not None:
        assert all(torch.equal(first, rank.values) for rank in ranks if rank.values is not None)
        error = relative_error(first[expected != 0], expected[expected != 0])
        wrong += [f"{way} differ by {error:.1e}"] if not error < bound else []
        if way == "log_probs" and first[expected == 0].any():
            wrong.append("log-probabilities where there is no label")
    step = reduced([rank.step for rank in ranks])
    return wrong + complaints(step, wanted.mean if way == "loss" else wanted.weighted, way, bound)
