"""Decides whether rows of a batch that begin alike are computed as one row with branches."""

import warnings
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from longctx_patch.data.prefixes import Beginnings, Floats, Ints
from longctx_patch.data.rows import Row
from longctx_patch.data.whole_rows import SharedTokens, WholeRows
from longctx_patch.families.facts import ModelFacts
from longctx_patch.hf.call.decoder_call import DecoderCalls
from longctx_patch.hf.call.image_rows import has_images
from longctx_patch.sequence.pairs import pairs_of

LEAST_SAVED = 0.1
"""Share of the layers' FLOPs that `auto` has to save: below it, another layout and more regions of
the mask may cost as much."""


class CannotShareError(ValueError):
    """`always` was asked for, and these rows can't share their beginnings."""


class Sharing:
    """Joins the rows of one patched model by `LongContextConfig.share_prefixes`."""

    def __init__(self, model: PreTrainedModel, calls: DecoderCalls) -> None:
        self._model, self._calls = model, calls
        self._config = calls.group.config

    def joined(self, whole: WholeRows, given: Mapping[str, Any]) -> tuple[Row, SharedTokens] | None:
        """The rows as one, or None where they stay apart; `given`: the arguments of the forward
        pass. All ranks that are given the same find the same.

        Raises CannotShareError under `always` for rows that begin alike and can't share that.
        """
        how = self._config.share_prefixes
        found = None if how == "off" else Beginnings.of(whole)
        if found is None or (how == "auto" and found.saved(self._flops) < LEAST_SAVED):
            return None
        if (why := self._obstacle(whole, given)) is None:
            return found.join()
        if how == "always":
            raise CannotShareError(
                f"share_prefixes='always' with rows that begin alike, but {why}. Use "
                "share_prefixes='auto', which computes such rows apart, or 'off'."
            )
        warnings.warn(f"Rows that begin alike are computed apart: {why}.", stacklevel=2)
        return None

    def _flops(self, first: Ints) -> Floats:
        """Multiply-adds of the `first` tokens of a row, `[N]` numbers of them, in attention and the
        products around it; experts count as one ordinary MLP."""
        facts, windows = self._facts
        heads = facts.num_heads + facts.num_kv_heads
        weights = 2 * heads * facts.head_dim + 3 * facts.intermediate_size
        flops = 1.0 * first * len(facts.layers) * facts.hidden_size * weights
        for window, num_layers in windows.items():
            within = first if window is None else first.clip(max=window)
            pairs = pairs_of(within) + (first - within) * within
            flops += 2.0 * num_layers * pairs * facts.num_heads * facts.head_dim
        return flops

    @cached_property
    def _facts(self) -> tuple[ModelFacts, Counter[int | None]]:
        """Returns those of the model, and how many layers have each window."""
        facts = ModelFacts.of(self._model.config)
        return facts, Counter(facts.windows)

    def _obstacle(self, whole: WholeRows, given: Mapping[str, Any]) -> str | None:
        """Says what does not go with branches, in words."""
        calls, config = self._calls, self._config
        if calls.mask is not None:
            return "the model was patched with mask=, which tells tokens by their places in a row"
        if has_images(given):
            return "they have images, whose positions follow from the row that they are in"
        longest = max(length for row in whole.rows for length in row.lengths)
        chunk = min((size for size in calls.chunks.values() if size), default=longest)
        if chunk < longest:
            return f"chunks of {chunk} tokens attend by themselves, and branches begin within them"
        if config.shifted_group and self._model.training:
            return f"shifted_group={config.shifted_group} cuts rows into groups from their start"
        return self._noise()

    def _noise(self) -> str | None:
        for name, module in self._model.named_modules():
            if module.training and (p := dropout_of(module)):
                return (
                    f"{name} drops out with p={p}, and would draw once for what rows share "
                    "(set it to 0, lora_dropout=0 for an adapter)"
                )
            if module.training and (alpha := getattr(module, "neftune_noise_alpha", None)):
                return (
                    f"neftune_noise_alpha={alpha} would draw once for what rows share, and scale "
                    "the noise by the length of the joined row (leave it out)"
                )
        return None


def dropout_of(module: nn.Module) -> float:
    """The probability with which a module drops out in training; 0 for one that does not."""
    return float(module.p) if isinstance(module, _DropoutNd) else 0.0
