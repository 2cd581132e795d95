"""One forward pass of a patched decoder over a shard: checks before it, attention inside it."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx_patch.call import AttentionCall
from longctx_patch.data import SHARD_KEY
from longctx_patch.documents import Documents
from longctx_patch.groups import SequenceGroup
from longctx_patch.hf import transformers_api
from longctx_patch.hf.fire_check import FireCheck
from longctx_patch.hf.router import whole_router_logits
from longctx_patch.kernels import Score
from longctx_patch.masks import Mask, within
from longctx_patch.operator import distributed_attention, restricted
from longctx_patch.placement import placement_of

_KNOWN = (
    transformers_api.DECODER_ARGUMENTS | transformers_api.HARMLESS_OPTIONS | {"num_valid_tokens"}
)
_KNOWN_TO_LAYERS = _KNOWN | transformers_api.LAYER_OPTIONS | {"sliding_window"}

MaskFactory = Callable[[int], Mask]
"""From the length of a padded row to who sees whom in its layers with full attention."""


class LayerKind(NamedTuple):
    """What decides a layer's attention call, besides the row."""

    score: Score
    num_heads: int
    num_kv_heads: int
    window: int | None


class CallShape(NamedTuple):
    """What decides a layer's plans and kernel, besides its kind and the row."""

    device_type: str
    dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True)
class ShardedCall:
    """Travels with one forward pass, from the decoder to each of its attention layers."""

    group: SequenceGroup
    documents: Documents
    mask: Mask | None
    """Who sees whom in layers with full attention; None: causally within documents."""
    real_lengths: tuple[int, ...]
    """Tokens of each row of the batch without its padding."""
    seen: dict[LayerKind, CallShape] = field(default_factory=dict)
    """Kinds of layers that have run, for whoever makes plans ahead."""
    fire_check: FireCheck | None = None
    _calls: dict[LayerKind, AttentionCall] = field(default_factory=dict)

    def attention(self, kind: LayerKind) -> AttentionCall:
        """The same object for all layers that are alike."""
        if kind not in self._calls:
            longest = max(self.documents.lengths, default=0)
            window = None if kind.window is None or kind.window >= longest else kind.window
            self._calls[kind] = AttentionCall(
                self.group,
                self.documents,
                restricted(self.mask, self.documents, window),
                kind.score,
                kind.num_heads,
                kind.num_kv_heads,
                plan_name=None if window is None else "halo",
            )
        return self._calls[kind]

    def make_plans(self) -> None:
        """Plans of both directions for all kinds of layers that have been seen."""
        for kind, shape in list(self.seen.items()):
            self.attention(kind).prepare(*shape, batch=len(self.real_lengths))


def sharded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    call: ShardedCall,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: `[B, H, L, D]` in, `[B, L, H, D]` out.

    What a caller passes to the model was checked before the decoder ran; what a layer adds by
    itself is checked here, alike on every rank.
    """
    _check_layer(module, value.shape[3] == query.shape[3], dropout, options)
    if torch.is_autocast_enabled(query.device.type):
        # Stock attention functions are on autocast's list; rotary embeddings leave q, k in float32.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    # Qwen2-MoE doesn't pass its window on; EXAONE-4's full layers have one, but pass None.
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    kind = LayerKind(Score(scale, softcap), query.shape[1], key.shape[1], window)
    attention_call = call.attention(kind)
    call.seen[kind] = CallShape(query.device.type, query.dtype, query.shape[3])
    try:
        attention_call.kernel(query.device.type, query.dtype, query.shape[3])
    except ValueError as error:
        raise ValueError(f"{layer_name(module)}: {error}") from error
    q_BLHD, k_BLGD, v_BLGD = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out_BLHD, _lse = distributed_attention(q_BLHD, k_BLGD, v_BLGD, s_aux, attention_call)
    if call.fire_check is not None:
        call.fire_check.layer_ran(
            module, attention_call, q_BLHD, out_BLHD, has_sinks=s_aux is not None
        )
    return out_BLHD, None


def _check_layer(
    module: nn.Module, alike_head_dims: bool, dropout: float, options: Mapping[str, Any]
) -> None:
    """Refuse what a layer asks for that would be dropped."""
    asked = {"dropout": dropout} if dropout else {}
    asked |= {
        name: value
        for name, value in options.items()
        if name not in _KNOWN_TO_LAYERS and value is not None and value is not False
    }
    if asked:
        described = ", ".join(f"{name}={_short(value)}" for name, value in asked.items())
        raise ValueError(
            f"{layer_name(module)} asks attention for {described}: sequence parallelism does not "
            "cover it and would drop it. Use a model without it, or handle.unpatch() and train on "
            "one process."
        )
    if not alike_head_dims:
        raise ValueError(
            f"{layer_name(module)} has values of another head dim than its queries: kernels here "
            "take one head dim. Train this model on one process."
        )


def layer_name(module: nn.Module) -> str:
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


def with_whole_router_logits(outputs: Any, call: ShardedCall) -> Any:
    """The decoder's outputs, with the router logits of whole rows where it returns some."""
    if getattr(outputs, "router_logits", None):
        outputs.router_logits = whole_router_logits(
            outputs.router_logits,
            call.group,
            call.group.layout(call.documents),
            call.real_lengths,
        )
    return outputs


def prepare_call(
    group: SequenceGroup,
    decoder: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mask_factory: MaskFactory | None = None,
    seen: dict[LayerKind, CallShape] | None = None,
    fire_check: FireCheck | None = None,
) -> dict[str, Any]:
    """The decoder's keyword arguments for a sharded or a stock forward pass."""
    shard = kwargs.pop(SHARD_KEY, None)
    if shard is None:
        _check_whole_rows(group, kwargs)
        if decoder.training and group.num_ranks > 1:
            raise ValueError(
                f"this model is patched for {group.num_ranks} ranks per sequence, but the training "
                "batch has no longctx_shard. Use SequenceShardCollator; model.eval() first to "
                "generate or evaluate whole rows; or handle.unpatch()."
            )
        return kwargs | {transformers_api.CALL_KEY: None}
    tokens = _tokens(args, kwargs)
    row = ShardedRow.read(shard)
    positions = row.documents.positions(
        group.layout(row.documents).positions(group.group_rank, tokens.device)
    )[None]
    wants_router_logits = _wants_router_logits(decoder, kwargs)
    problem = _input_problem(kwargs, positions, wants_router_logits)
    mask = None
    if mask_factory is not None and problem is None:
        mask, problem = _made_mask(mask_factory, row)
    count = kwargs.get("num_valid_tokens")
    mine = _Facts(
        num_tokens=row.documents.num_tokens,
        checksum=zlib.crc32(repr(shard.tolist()).encode()),
        num_rows=tokens.shape[0],
        local_tokens=tokens.shape[1],
        training=int(decoder.training),
        grad_enabled=int(torch.is_grad_enabled()),
        num_valid_tokens=-1 if count is None or problem else int(count),
        mask=0 if mask is None else mask.checksum,
        router_logits=int(wants_router_logits),
        accepted=int(problem is None),
    )
    _agree(group, row.documents, mine, problem)
    is_plain = row.documents.is_one and mask is None and not wants_router_logits
    if group.num_ranks == 1 and is_plain and group.config.checkpoint != "attention":
        return kwargs | {transformers_api.CALL_KEY: None}
    return kwargs | {
        "attention_mask": transformers_api.no_mask(tokens.shape[0], tokens.device),
        "position_ids": positions.expand(tokens.shape[0], -1),
        "use_cache": False,
        transformers_api.CALL_KEY: ShardedCall(
            group,
            row.documents,
            mask,
            row.real_lengths,
            {} if seen is None else seen,
            fire_check,
        ),
    }


def plans_of_batch(
    group: SequenceGroup,
    shard: Tensor,
    mask_factory: MaskFactory | None,
    seen: dict[LayerKind, CallShape],
) -> None:
    """Make the plans that a forward pass over this batch will look for."""
    row = ShardedRow.read(shard)
    mask, problem = (None, None) if mask_factory is None else _made_mask(mask_factory, row)
    if problem is None:  # else the forward pass says so, on all ranks
        ShardedCall(group, row.documents, mask, row.real_lengths, seen).make_plans()


def _wants_router_logits(decoder: nn.Module, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("output_router_logits")
    if asked is None:
        asked = getattr(decoder.config, "output_router_logits", False)
    return bool(asked)


@dataclass(frozen=True)
class ShardedRow:
    """What `longctx_shard` says of a batch."""

    documents: Documents
    """Those of every row of the batch."""
    real_lengths: tuple[int, ...]
    """Tokens of each row of the batch without its padding."""

    @classmethod
    def read(cls, shard: Tensor) -> "ShardedRow":
        rows = shard.tolist()
        lengths = [tuple(length for length in row[2:] if length) for row in rows]
        documents = Documents.of_row(lengths[0], rows[0][0])
        return cls(documents, tuple(map(sum, lengths)))

    @property
    def has_padding(self) -> bool:
        return any(length < self.documents.num_tokens for length in self.real_lengths)


def _made_mask(factory: MaskFactory, row: ShardedRow) -> tuple[Mask | None, str | None]:
    """(mask, problem) of what the user's function gives for a row."""
    num_tokens = row.documents.num_tokens
    mask = factory(num_tokens)
    if not isinstance(mask, Mask) or mask.num_tokens != num_tokens:
        return None, (
            f"the mask function gave {_short(mask)} for {num_tokens} tokens: it returns a Mask "
            "over as many tokens as it is asked for (longctx_patch.masks makes them)."
        )
    if not (mask.sees_ahead and row.has_padding and row.documents.is_one):
        return mask, None
    if len(row.real_lengths) > 1:
        return None, (
            "the mask lets tokens see later ones, so they would see the padding of the rows "
            f"({list(row.real_lengths)} of {num_tokens} tokens are real). Use "
            "SequenceShardCollator(packed=True), or rows of equal lengths."
        )
    return mask & within(Documents(row.real_lengths, num_tokens), None), None


class _Facts(NamedTuple):
    """What ranks compare before a forward pass; all but `local_tokens` must be equal."""

    num_tokens: int
    checksum: int
    num_rows: int
    local_tokens: int
    training: int
    grad_enabled: int
    num_valid_tokens: int
    mask: int
    router_logits: int
    accepted: int


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for candidate in (args[0] if args else None, kwargs.get("input_ids")):
        if candidate is not None:
            return candidate
    if kwargs.get("inputs_embeds") is None:
        raise ValueError("the batch has neither input_ids nor inputs_embeds.")
    return kwargs["inputs_embeds"]


def _check_whole_rows(group: SequenceGroup, kwargs: dict[str, Any]) -> None:
    """Without longctx_shard the batch should be whole rows; positions can tell that it is not."""
    given = kwargs.get("position_ids")
    padded = kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None
    if group.num_ranks == 1 or given is None or padded:
        return
    if not _same_positions(given, torch.arange(given.shape[-1], device=given.device)[None]):
        raise ValueError(
            f"position_ids start {given.flatten()[:4].tolist()}: this looks like a shard, but its "
            "longctx_shard is missing. Pass the batch of SequenceShardCollator unchanged, or whole "
            "rows with positions from 0."
        )


def _input_problem(
    kwargs: dict[str, Any], positions: Tensor, wants_router_logits: bool
) -> str | None:
    """What this rank can't compute with, in words; `positions` are the layout's, `[1, L]`."""
    if kwargs.get("num_items_in_batch") is not None:
        return (
            "num_items_in_batch with a sharded batch: transformers' Trainer counts and scales it "
            "in ways that change with its version; the loss would be off by the sequence degree. "
            "Pass num_valid_tokens=count_valid_tokens(batches), or neither."
        )
    count = kwargs.get("num_valid_tokens")
    if count is not None and not _is_count(count):
        return (
            f"num_valid_tokens={_short(count)}: it is a whole number of tokens, 0 or more, counted "
            "over all processes. Use count_valid_tokens(batches), or leave it out."
        )
    if kwargs.get("past_key_values") is not None:
        return (
            "past_key_values with a sharded batch: a cache holds one rank's keys only. Generate "
            "with plain inputs (no longctx_shard), or drop the cache."
        )
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
        return (
            f"attention_mask {_short(mask)} with a sharded batch: padding and documents are known "
            "from the collator, which gets attention_mask and seq_lengths with the rows; other "
            "masks go to patch(model, config, mask=...). Pass the batch unchanged."
        )
    if mask is not None and wants_router_logits:
        return (
            f"attention_mask {_short(mask)} with router logits of a sharded batch: transformers "
            "would weigh the tokens of all ranks by this rank's mask. Pass no attention_mask; "
            "padding is known from the collator."
        )
    given = kwargs.get("position_ids")
    if given is not None and not _same_positions(given, positions):
        # A shard counted from 0 would rotate its keys wrongly, and train all the same.
        return (
            f"position_ids start {given.flatten()[:4].tolist()}, but this rank's tokens have the "
            f"positions {positions[0, :4].tolist()} and so on in their documents. Pass the "
            "collator's position_ids, or none."
        )
    for option, value in kwargs.items():
        if option in _KNOWN or value is None or (value is False and option != "is_causal"):
            continue
        if option == "is_causal" and value is True:
            continue
        return (
            f"{option}={_short(value)} with a sharded batch: attention would silently drop it, so "
            "it is refused. Remove it, or handle.unpatch() and train on one process."
        )
    return None


def _is_count(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_floating_point() and int(value) >= 0
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: object) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


def _same_positions(given: Tensor, positions: Tensor) -> bool:
    if given.ndim != 2 or given.shape[1] != positions.shape[1]:
        return False
    return torch.equal(given, positions.expand_as(given).to(given))


def _agree(group: SequenceGroup, documents: Documents, mine: _Facts, problem: str | None) -> None:
    """Raise on every rank unless all hold shards of one batch, before anything is sent."""
    rows = [_Facts(*row) for row in group.everyone.all_gather_numbers(mine)]
    if problem is not None:
        raise ValueError(problem)
    sizes = group.layout(documents).sizes
    same = {row._replace(local_tokens=0) for row in rows} == {mine._replace(local_tokens=0)}
    if same and tuple(row.local_tokens for row in rows) == sizes:
        if min(sizes):
            return
        raise ValueError(
            f"{mine.num_tokens} tokens over {group.num_ranks} ranks leaves a rank without tokens, "
            "which a model can't compute. Pad the rows; SequenceShardCollator does."
        )
    table = "\n".join(_describe(rank, row) for rank, row in enumerate(rows))
    raise ValueError(
        f"the {group.num_ranks} ranks of a sequence group must hold shards of the same batch:\n"
        f"{table}\nThe {placement_of(group.config, documents)} layout of {mine.num_tokens} tokens "
        f"in {len(documents.lengths)} documents gives the ranks "
        f"{list(sizes)}. Feed every rank of the group the same rows (same sampler and seed; "
        "dispatch_batches=False) through SequenceShardCollator."
    )


def _describe(rank: int, row: _Facts) -> str:
    if not row.accepted:
        return f"  rank {rank}: it refused its batch, its own error says why"
    count = "" if row.num_valid_tokens < 0 else f", num_valid_tokens {row.num_valid_tokens}"
    return (
        f"  rank {rank}: {row.local_tokens} of {row.num_tokens} tokens, {row.num_rows} rows, "
        f"checksum {row.checksum:08x}, {'training' if row.training else 'evaluating'}, "
        f"gradients {'on' if row.grad_enabled else 'off'}, mask {row.mask:08x}, "
        f"router logits {'on' if row.router_logits else 'off'}{count}"
    )
