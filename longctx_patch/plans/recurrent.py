"""The sizes of a layer's recurrence, and what it sends where heads are exchanged for tokens.

A recurrence of one head needs nothing of other heads. So ranks of a Ulysses group can exchange its
inputs as they do those of attention, until each has all tokens of the group for some heads, and
exchange its outputs back.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from longctx_patch.plans.chain import ChainTraffic
from longctx_patch.plans.head_split import Heads, HeadSplit, to_heads_traffic, to_tokens_traffic
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents

RecurrenceKind = Literal["delta rule", "delta rule by channel", "Mamba-2"]
"""A gated delta rule with one decay per head, one with a decay per channel of the key (Kimi), and
the state space of Mamba-2."""
RecurrentWay = Literal["states", "heads"]
"""What ranks send for a recurrence: maps of states along the row, or heads for tokens."""
RecurrentExchange = Literal["auto", "states", "heads"]
"""The same as a config names it."""

MANY_TOKENS = 2**15
"""The shortest row for which `auto` exchanges heads. By the planner's prediction shorter ones take
less than the exchanges' start."""


class HeadTensor(NamedTuple):
    """A tensor `[B, L, heads, dim]` of a recurrence."""

    heads: Heads
    """`QUERY`: it has one head for each state; `KEY_VALUE`: one for each group of states."""
    dim: int
    itemsize: int


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """The sizes that decide work and traffic of one layer's recurrence, besides its tokens."""

    kind: RecurrenceKind
    num_heads: int
    """Heads that have a state: value heads of a delta rule, heads of Mamba-2."""
    num_groups: int
    """Heads that several states may share: key heads, or groups of B and C."""
    key_dim: int
    """Numbers of a key; of a state in Mamba-2."""
    value_dim: int
    """Numbers of a value; of a head in Mamba-2."""
    batch: int = 1
    itemsize: int = 2
    """Bytes of one number in the model's dtype."""

    @property
    def wide_itemsize(self) -> int:
        """Bytes of one number of states and decays, which are float32 or wider."""
        return max(4, self.itemsize)

    @property
    def state_numbers(self) -> int:
        """Numbers of all heads' states, over the batch."""
        return self.batch * self.num_heads * self.key_dim * self.value_dim

    @property
    def facts(self) -> "RecurrenceFacts":
        return RECURRENCES[self.kind]

    @property
    def map_numbers(self) -> int:
        """Numbers of what a map leaves of a state that came in, over the batch."""
        return self.batch * self.num_heads * self.facts.map_numbers(self.key_dim)

    @property
    def inputs(self) -> tuple[HeadTensor, ...]:
        """The tensors that travel, in the order of the recurrence's inputs."""
        return self.facts.inputs(self)

    @property
    def run_flops(self) -> float:
        """FLOPs of its forward for each token of all heads."""
        return self.facts.run_flops(self, self.value_dim)

    @property
    def map_flops(self) -> float:
        """FLOPs for each token to find a segment's map."""
        return self.facts.map_flops(self)

    @property
    def output(self) -> HeadTensor:
        return HeadTensor(Heads.QUERY, self.value_dim, self.itemsize)


class RecurrenceFacts(NamedTuple):
    """One kind of recurrence: what travels of it, and what it computes."""

    inputs: Callable[[RecurrentShape], tuple[HeadTensor, ...]]
    map_numbers: Callable[[int], int]
    """How many numbers the M of a map S -> M S + U has for each head, by the size of a key."""
    run_flops: Callable[[RecurrentShape, int], float]
    """FLOPs for each token of all heads, where values and states have so many columns."""
    map_flops: Callable[[RecurrentShape], float]
    """FLOPs for each token to find a segment's map."""
    joins_documents: bool
    """Whether its kernels run whole documents of one row in one call."""


DELTA_CHUNK = 64
"""Tokens that flash-linear-attention's delta rules compute at once."""
STATE_SPACE_CHUNK = 256
"""The same for mamba-ssm, as most configs have it."""


def _delta_inputs(shape: RecurrentShape) -> tuple[HeadTensor, ...]:
    key = HeadTensor(Heads.KEY_VALUE, shape.key_dim, shape.itemsize)
    value = HeadTensor(Heads.QUERY, shape.value_dim, shape.itemsize)
    one = HeadTensor(Heads.QUERY, 1, shape.wide_itemsize)
    return key, key, value, one, one  # numbers per head travel in the widest dtype of any of them


def _channel_inputs(shape: RecurrentShape) -> tuple[HeadTensor, ...]:
    decay = HeadTensor(Heads.QUERY, shape.key_dim, shape.wide_itemsize)
    return *_delta_inputs(shape)[:3], decay, HeadTensor(Heads.QUERY, 1, shape.itemsize)


def _space_inputs(shape: RecurrentShape) -> tuple[HeadTensor, ...]:
    key = HeadTensor(Heads.KEY_VALUE, shape.key_dim, shape.itemsize)
    value = HeadTensor(Heads.QUERY, shape.value_dim, shape.itemsize)
    return value, value._replace(dim=1), key, key


# In chunks of C tokens, with keys of K numbers and values of V: the products of queries and of keys
# with keys, and what they are applied to, take C per token; states are read and written.


def _delta_flops(shape: RecurrentShape, v: int) -> float:
    c, k = DELTA_CHUNK, shape.key_dim
    return shape.batch * shape.num_heads * (6.0 * c * k + 4 * c * v + 6 * k * v)


def _delta_map_flops(shape: RecurrentShape) -> float:
    """The columns of a delta rule's map are run beside those of its values."""
    return _delta_flops(shape, shape.value_dim + shape.key_dim)


def _space_flops(shape: RecurrentShape, v: int) -> float:
    c, k = STATE_SPACE_CHUNK, shape.key_dim
    shared = 2.0 * c * k * shape.num_groups / shape.num_heads
    return shape.batch * shape.num_heads * (shared + 2 * c * v + 4 * k * v)


def _space_map_flops(shape: RecurrentShape) -> float:
    """Mamba-2 runs a second time with one number per head."""
    return _space_flops(shape, shape.value_dim) + _space_flops(shape, 1)


_DELTA_RULE = RecurrenceFacts(
    inputs=_delta_inputs,
    map_numbers=lambda key_dim: key_dim**2,
    run_flops=_delta_flops,
    map_flops=_delta_map_flops,
    joins_documents=True,
)
RECURRENCES: Mapping[RecurrenceKind, RecurrenceFacts] = MappingProxyType(
    {
        "delta rule": _DELTA_RULE,
        "delta rule by channel": _DELTA_RULE._replace(inputs=_channel_inputs),
        "Mamba-2": RecurrenceFacts(
            inputs=_space_inputs,
            map_numbers=lambda key_dim: 1,
            run_flops=_space_flops,
            map_flops=_space_map_flops,
            joins_documents=False,
        ),
    }
)


def states_because(num_heads: int, num_groups: int, degree: int) -> str | None:
    """Says why a Ulysses group can't exchange the heads of a recurrence; None: it can."""
    if degree == 1:
        return "ulysses_degree=1 exchanges no heads"
    if num_heads % degree:
        return f"{num_heads} heads with a state are no multiple of ulysses_degree={degree}"
    if num_groups % degree and degree % num_groups:
        return (
            f"{num_groups} key heads or groups and ulysses_degree={degree}: neither is a multiple "
            "of the other"
        )
    return None


def decide_recurrence(
    named: RecurrentExchange,
    shape: RecurrentShape,
    documents: Documents,
    *,
    ulysses: int,
    ring: int,
) -> RecurrentWay:
    """Returns what a config names. `auto` exchanges heads where states would travel and maps would
    be found: for delta rules, without a ring, on rows of `MANY_TOKENS` with fewer documents than
    ranks, of which one with its branches is one. Mamba-2's maps cost little, and in a ring states
    travel by either way.

    Every rank decides the same, since all see the same config, sizes and documents. Raises
    ValueError where the config asks for heads that can't be exchanged.
    """
    why = states_because(shape.num_heads, shape.num_groups, ulysses)
    if named == "heads" and why is not None:
        raise ValueError(f"recurrent_exchange='heads': {why}. Use recurrent_exchange='auto'.")
    if named != "auto":
        return named
    has_large_maps = shape.facts.map_numbers(shape.key_dim) > 1
    pays = has_large_maps and documents.begins.count(0) < ulysses
    is_long = documents.num_tokens >= MANY_TOKENS
    return "heads" if why is None and ring == 1 and pays and is_long else "states"


def packets(forms: Sequence[Hashable]) -> list[list[int]]:
    """The numbers of the tensors that travel in one all-to-all, since they have one form."""
    found: dict[Hashable, list[int]] = {}
    for number, form in enumerate(forms):
        found.setdefault(form, []).append(number)
    return list(found.values())


def heads_traffic(
    split: HeadSplit,
    inputs: Sequence[HeadTensor],
    output: HeadTensor,
    rank: int,
    *,
    sizes: Sequence[int],
    batch: int,
    inputs_learn: bool = True,
    output_learns: bool = True,
) -> ChainTraffic:
    """Returns what one rank of a Ulysses group sends for the inputs and the output of a recurrence.
    All of it goes again in a replay: it is as long as the row, and so is not kept.

    Args:
        rank: its rank in the group.
        sizes: tokens of each rank of the group.
        inputs_learn: whether any of the inputs has a gradient.
        output_learns: whether the output has one.
    """

    def of(tensors: Sequence[HeadTensor], *, inwards: bool) -> Traffic:
        total = Traffic()
        for numbers in packets([(tensor.dim, tensor.itemsize) for tensor in tensors]):
            kinds = [tensors[number].heads for number in numbers]
            first = tensors[numbers[0]]
            per_head = batch * first.dim * first.itemsize
            total += (
                to_heads_traffic(split, kinds, rank, tokens=sizes[rank], bytes_per_head=per_head)
                if inwards
                else to_tokens_traffic(split, kinds, rank, sizes=sizes, bytes_per_head=per_head)
            )
        return total

    forward = of(inputs, inwards=True) + of([output], inwards=False)
    backward = Traffic()
    if output_learns:
        backward += of([output], inwards=True)
    if inputs_learn:
        backward += of(inputs, inwards=False)
    return ChainTraffic(forward=forward, replay=forward, backward=backward)
