"""Attention in the layers of a patched decoder, for one forward pass over a shard."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx_patch.data.descriptor import Descriptor
from longctx_patch.data.whole_rows import SharedTokens
from longctx_patch.engine.autograd import distributed_attention
from longctx_patch.engine.call import AttentionCall, CallShape
from longctx_patch.engine.chain.chain_run import checked_chain
from longctx_patch.engine.decided import decided_call, row_mask
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.selective import selection_of
from longctx_patch.hf.call.fire_check import FireCheck
from longctx_patch.hf.call.gather import whole_router_logits
from longctx_patch.hf.call.inputs import KNOWN_TO_LAYERS, short
from longctx_patch.hf.call.latents import expansion_of
from longctx_patch.hf.model import transformers_api
from longctx_patch.kernels import Score
from longctx_patch.plans import Direction
from longctx_patch.plans.chain import Chain
from longctx_patch.plans.head_split import halves
from longctx_patch.plans.recurrent import RecurrentShape, RecurrentWay, decide_recurrence
from longctx_patch.sequence.layout import Layout
from longctx_patch.sequence.masks import Mask


class LayerKind(NamedTuple):
    """Holds what determines a layer's attention call, besides the row."""

    score: Score
    window: int | None
    shape: CallShape
    chunk: int | None = None
    first_chunk: int | None = None
    """Tokens of each document's first chunk, where it has others."""


class Part(NamedTuple):
    """Heads of a layer that have an attention call of their own."""

    heads: slice
    kv_heads: slice
    kind: LayerKind


class ShardedCall:
    """Travels with one forward pass, from the decoder to each of its attention layers.

    Not a dataclass: FSDP searches the fields of dataclasses that layers are given for tensors, and
    plans have many fields.
    """

    def __init__(
        self,
        group: SequenceGroup,
        row: Descriptor,
        mask: Mask | None,
        seen: set[LayerKind],
        chunks: Mapping[int, int | None],
    ) -> None:
        self.group = group
        self.documents, self.real_lengths = row.documents, row.real_lengths
        self.mask = mask
        """Who sees whom in layers with full attention; None: causal within documents."""
        self.only_windows_are_masked = False
        """Whether layers without a window are causal in spite of the mask, as Gemma 4's are."""
        self.seen = seen
        """Kinds of layers that have run; plans made ahead are for these."""
        self.chunks = chunks
        """Tokens of the chunks in which layers attend, by the layer's number."""
        self.shared: SharedTokens | None = None
        """Where the tokens of rows are that share their beginnings."""
        self.fire_check: FireCheck | None = None
        self.positions: Tensor | None = None
        """`[L]`: positions of this rank's tokens in their documents; set when the pass begins."""
        self._calls: dict[LayerKind, AttentionCall] = {}

    def attention(self, kind: LayerKind) -> AttentionCall:
        """The attention call of a layer; layers that are alike share one object."""
        if kind not in self._calls:
            longest = self.documents.longest
            window = None if kind.window is None or kind.window >= longest else kind.window
            chunk = kind.chunk
            if chunk is not None and (kind.first_chunk or chunk) >= longest:
                chunk = None
            is_causal = self.only_windows_are_masked and kind.window is None
            mask = None if is_causal else self.mask
            self._calls[kind] = decided_call(
                self.group,
                self.documents,
                row_mask(mask, self.documents, window, chunk, chunk and kind.first_chunk),
                kind.score,
                kind.shape,
                is_local=window is not None or chunk is not None,
            )
        return self._calls[kind]

    @cached_property
    def chain(self) -> Chain:
        """Whose state goes on from whose in recurrent layers."""
        return checked_chain(self.group.layout(self.documents), self.documents)

    @property
    def counted(self) -> Tensor | None:
        """Places of the tokens of rows apart, where rows share some; None: of each token once."""
        if self.shared is not None:
            return self.shared.places[self.shared.places >= 0]
        return self.documents.written_out() if self.documents.has_branches else None

    @cached_property
    def ring_layout(self) -> Layout:
        """Returns where tokens are if each Ulysses group counts as one rank."""
        return self.group.config.ring_layout_of(self.documents)

    @cached_property
    def ring_chain(self) -> Chain:
        """The chain of recurrent layers whose heads are exchanged."""
        return checked_chain(self.ring_layout, self.documents)

    def recurrent_way(self, shape: RecurrentShape) -> RecurrentWay:
        """Returns what ranks send for recurrent layers of these sizes."""
        config = self.group.config
        return decide_recurrence(
            config.recurrent_exchange,
            shape,
            self.documents,
            ulysses=config.ulysses_degree,
            ring=config.ring_degree,
        )

    def make_plans(self) -> None:
        """Make the plans of both directions for all kinds of layers that have been seen."""
        batch, share = len(self.real_lengths), self.group.config.attention_kept
        for kind in tuple(self.seen):
            call = self.attention(kind._replace(shape=kind.shape._replace(batch=batch)))
            call.prepare()
            selection = selection_of(call, share) if share else None
            if selection is not None:
                selection.early.prepare((Direction.FORWARD,))


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
    """transformers' attention function: `[B, H, L, D]` in, `[B, L, H, V]` out; V is D, except in
    latent attention.

    Options that a caller passes to the model were checked before the decoder ran; those that a
    layer adds by itself are checked here, with the same result on every rank.
    """
    _check_layer(module, dropout, options)
    if torch.is_autocast_enabled(query.device.type):
        # Autocast casts for stock attention functions; rotary embeddings leave q, k in float32.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    # Qwen2-MoE doesn't pass its window on; EXAONE-4's full layers have one, but pass None.
    window = options.get("sliding_window", transformers_api.window_of(module))
    q_BLHD, k_BLGD, v_BLGD = (tensor.transpose(1, 2) for tensor in (query, key, value))
    shape, expansion = CallShape.of(q_BLHD, k_BLGD, v_BLGD), expansion_of(module, query)
    if expansion is not None:
        shape = shape.with_latents(k_BLGD, v_BLGD, expansion.value_dim)
    chunk = call.chunks.get(getattr(module, "layer_idx", -1))
    kind = LayerKind(Score(scale, softcap), window, shape, chunk)
    group = call.group.config.shifted_group if module.training else 0
    parts = parts_of(kind, group)
    calls = [call.attention(part.kind) for part in parts]
    call.seen.update(part.kind for part in parts)
    try:
        for attention_call in calls:
            attention_call.kernel()
    except ValueError as error:
        raise ValueError(f"{layer_name(module)}: {error}") from error
    if call.fire_check is not None:
        call.fire_check.layer_begins(module)
    outputs = [
        distributed_attention(
            q_BLHD[:, :, part.heads],
            k_BLGD[:, :, part.kv_heads],
            v_BLGD[:, :, part.kv_heads],
            None if s_aux is None else s_aux[part.heads],
            attention_call,
            layer=getattr(module, "layer_idx", None),
            expansion=expansion,
        )[0]
        for part, attention_call in zip(parts, calls, strict=True)
    ]
    out_BLHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    if call.fire_check is not None:
        call.fire_check.layer_ran(module, calls, q_BLHD, out_BLHD, has_sinks=s_aux is not None)
    return out_BLHD, None


def parts_of(kind: LayerKind, shifted_group: int) -> list[Part]:
    """All heads; or, of a layer with full attention, its two halves of shifted sparse attention in
    groups of so many tokens (`LongContextConfig.shifted_group`)."""
    if not shifted_group or kind.window is not None or kind.chunk is not None:
        return [Part(slice(None), slice(None), kind)]
    parts: list[Part] = []
    for q, kv in halves(kind.shape.num_heads, kind.shape.num_kv_heads):
        shape = kind.shape._replace(num_heads=q.stop - q.start, num_kv_heads=kv.stop - kv.start)
        first = shifted_group // 2 if parts else None
        half = kind._replace(shape=shape, chunk=shifted_group, first_chunk=first)
        parts.append(Part(q, kv, half))
    return parts


def _check_layer(module: nn.Module, dropout: float, options: Mapping[str, Any]) -> None:
    """Refuse options of a layer that would be dropped."""
    asked = {"dropout": dropout} if dropout else {}
    asked |= {
        name: value
        for name, value in options.items()
        if name not in KNOWN_TO_LAYERS and value is not None and value is not False
    }
    if asked:
        described = ", ".join(f"{name}={short(value)}" for name, value in asked.items())
        raise ValueError(
            f"{layer_name(module)} asks attention for {described}: sequence parallelism does not "
            "cover it and would drop it. Use a model without it, or handle.unpatch() and train on "
            "one process."
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
            call.counted,
        )
    return outputs
