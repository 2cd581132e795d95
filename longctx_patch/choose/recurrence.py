"""Decide what ranks send for a recurrent layer: states along all ranks, or heads for tokens."""

from functools import lru_cache
from typing import NamedTuple

from longctx_patch.config import LongContextConfig
from longctx_patch.memory.policies import POLICIES
from longctx_patch.plans.recurrent import RecurrentShape, RecurrentWay, states_because
from longctx_patch.predict.machines import MACHINES, Hardware
from longctx_patch.predict.recurrence import (
    Recompute,
    RecurrencePrediction,
    Row,
    predict_recurrence,
    recompute_under,
)
from longctx_patch.sequence.documents import Documents


class RecurrentWork(NamedTuple):
    """A layer's recurrence over a row."""

    shape: RecurrentShape
    documents: Documents


def predict_decided(
    config: LongContextConfig, work: RecurrentWork, hardware: Hardware
) -> RecurrencePrediction:
    """What a recurrence takes by the way that a config would go on a machine."""
    way = decide_recurrence(config, *work, hardware)
    return predict_recurrence(work.shape, row_of(config, work.documents), way, hardware)


@lru_cache(maxsize=256)
def decide_recurrence(
    config: LongContextConfig,
    shape: RecurrentShape,
    documents: Documents,
    hardware: Hardware | None = None,
) -> RecurrentWay:
    """What the config names, or what the cost model finds faster over forward and backward, and
    the recompute where layers are recomputed.

    Every rank decides the same, since all see the same config, sizes and documents. Raises
    ValueError where the config asks for heads that can't be exchanged.
    """
    why = states_because(shape.num_heads, shape.num_groups, config.ulysses_degree)
    if config.recurrent_exchange == "heads" and why is not None:
        raise ValueError(f"recurrent_exchange='heads': {why}. Use recurrent_exchange='auto'.")
    if config.recurrent_exchange != "auto":
        return config.recurrent_exchange
    if why is not None:
        return "states"
    recompute = recompute_of(config)
    states, heads = both_ways(config, shape, documents, hardware)
    return "heads" if heads.seconds(recompute) < states.seconds(recompute) else "states"


def recompute_of(config: LongContextConfig) -> Recompute:
    """What a step runs again of a recurrent layer; under `auto` that of most layers."""
    return recompute_under(POLICIES[config.checkpoint].rungs[0], config.attention_kept)


def both_ways(
    config: LongContextConfig,
    shape: RecurrentShape,
    documents: Documents,
    hardware: Hardware | None = None,
) -> tuple[RecurrencePrediction, RecurrencePrediction]:
    """(states, heads): what each way takes on the machine, by default the config's."""
    hardware, row = hardware or MACHINES[config.hardware], row_of(config, documents)
    return (
        predict_recurrence(shape, row, "states", hardware),
        predict_recurrence(shape, row, "heads", hardware),
    )


def row_of(config: LongContextConfig, documents: Documents) -> Row:
    """A row, as the config places it."""
    return Row(
        documents=documents,
        placement=config.placement_of(documents),
        ring=config.ring_degree,
        ulysses=config.ulysses_degree,
    )
