"""Attention calls with everything decided: who sees whom, and which plans run."""

from dataclasses import replace
from functools import lru_cache

from longctx_patch.engine.call import AttentionCall, CallShape
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.kernels import Score
from longctx_patch.plans.generators.table import SPARSE_PLAN
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import Mask, documents_mask, within


def decided_call(
    group: SequenceGroup,
    documents: Documents,
    mask: Mask,
    score: Score,
    shape: CallShape,
    *,
    returns_lse: bool = False,
    is_local: bool = False,
) -> AttentionCall:
    """The call that a group runs for a row.

    A layer with a window or chunks (`is_local`) runs the plan that sends only what is inside of
    them, whatever plan the config names.
    """
    setting = group.config.setting_of(
        group.config.placement_of(documents),
        num_tokens=documents.num_tokens,
        reuse=shape.reuse,
        is_causal=mask.is_causal,
    )
    if is_local:
        setting = setting.with_plan(SPARSE_PLAN)
    return AttentionCall(group, documents, mask, score, shape, setting, returns_lse)


@lru_cache(maxsize=64)
def row_mask(
    mask: Mask | None,
    documents: Documents,
    window: int | None,
    chunk: int | None = None,
    first: int | None = None,
) -> Mask:
    """Causal attention, or `mask`, within documents and a window, or chunks of documents, of which
    the first has `first` tokens where that is given."""
    pieces = documents if chunk is None else documents.cut(chunk, first)
    if mask is None:
        found = documents_mask(pieces, window=window)
        name = f"chunk {chunk}" + (f", the first {first}" if first else "")
        return found if chunk is None else replace(found, name=name)
    if pieces.is_one and window is None:
        return mask
    return mask & within(pieces, window)
