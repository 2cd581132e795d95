"""Bytes of a training step on one GPU and its host, by component, predicted.

What a layer keeps is counted in `longctx_patch.planner.layer_bytes`. A step has three moments
at which it can peak, and the largest is the prediction:

- **loss**: everything kept is alive, and the head works on a chunk of logits;
- **backward of the last layer**: the other layers' tensors are still kept, and this layer has all
  of its own;
- **backward of the first layer**: all gradients are there.

Where layers are of two kinds, these are the last and the first layer of each.

In a step of several forwards all gradients are there at each of them, from the second forward on.
"""

from dataclasses import dataclass

from longctx_patch.families.stored_tensors import BLOCK_BYTES, READERS
from longctx_patch.loss.linear_head import CHUNK_BYTES
from longctx_patch.memory.limits import AHEAD
from longctx_patch.memory.policies import POLICIES
from longctx_patch.planner.job import Candidate, Job, Parts
from longctx_patch.planner.layer_bytes import (
    BF16,
    FP32,
    LayerBytes,
    checkpoint_bytes,
    kept_bytes,
    layer_bytes,
    mixer_buffers,
    mixer_gradients,
)

NF4 = 0.516
"""Bytes of a weight: 4 bits, a scale of 8 for each 64 weights, one of 32 for each 256 scales
(QLoRA)."""

LAYER_OBJECTS_BYTES = 357_000
"""What one layer takes in each process beside its numbers: modules, parameters, and what FSDP2 and
torch's distributed tensors note of them. Measured of 80 layers of Llama."""


@dataclass(frozen=True, kw_only=True)
class Components(Parts):
    """Bytes of one GPU at the moment at which most is held."""

    weights: float
    """Shards of the weights, and the layers that FSDP has gathered."""
    gradients: float
    optimizer: float
    checkpoints: float
    """What all layers keep for backward."""
    layer: float
    """What the layer that is being computed holds: what it recomputes, and what passes through."""
    attention: float
    """Buffers of backward of attention, or of a recurrence: gradients and sums."""
    communication: float
    """Blocks that arrive from other ranks or leave for them."""
    logits: float


def predict_memory(
    job: Job, candidate: Candidate, tokens: float, buffer_bytes: float
) -> Components:
    """Memory at the moment that needs most.

    Args:
        tokens: number of tokens of one rank.
        buffer_bytes: bytes that the attention plan holds of other ranks.
    """
    moments = [_loss(job, candidate, tokens)]
    for number in _ends(job):
        moments.append(_backward(job, candidate, tokens, buffer_bytes, number))
    return max(moments, key=lambda components: components.total)


def _ends(job: Job) -> list[int]:
    """Numbers of the last and the first layer of each kind, in the order of backward."""
    layers = job.shape.layers
    first = {kind: number for number, kind in reversed([*enumerate(layers)])}
    last = {kind: number for number, kind in enumerate(layers)}
    return sorted({*first.values(), *last.values()}, reverse=True)


def _bytes_of_layers(job: Job, candidate: Candidate) -> list[LayerBytes]:
    """Returns the bytes of each layer, first to last."""
    of_kinds = {kind: layer_bytes(job, candidate, kind) for kind in job.shape.kinds}
    return [of_kinds[kind] for kind in job.shape.layers]


def host_bytes(job: Job, candidate: Candidate, tokens: float) -> float:
    """Bytes of one machine's host, of all its processes together."""
    layers = zip(_bytes_of_layers(job, candidate), candidate.policies, strict=True)
    on_host = [layer for layer, policy in layers if POLICIES[policy].on_host]
    per_gpu = tokens * sum((checkpoint_bytes(candidate, layer) for layer in on_host), 0.0)
    if candidate.offload_states:
        per_gpu += sum(states(job))
    return per_gpu * job.cluster.gpus_per_node


def states(job: Job) -> tuple[float, float, float]:
    """(weights, gradients, optimizer): bytes that one GPU's part takes, there or on the host.

    FSDP2 with mixed precision keeps what is trained in float32 and all else as it was loaded.
    Without FSDP2 each process trains the whole model as it was loaded. Adapters are float32.
    """
    ranks, trained = job.num_shards, job.trained_weights
    width = FP32 if job.fsdp or job.lora or job.dtype == "float32" else BF16
    return (
        (width * trained + (loaded_bytes(job) if job.lora else 0)) / ranks,
        width * trained / ranks,
        2 * width * trained / ranks,
    )


def loaded_bytes(job: Job) -> float:
    """Bytes of the whole model as it is loaded. bitsandbytes has 4 bits for linear modules, which
    experts are not."""
    if job.dtype != "nf4":
        return (FP32 if job.dtype == "float32" else BF16) * job.shape.num_weights
    narrow = job.shape.dense_weights_in_layers
    return NF4 * narrow + BF16 * (job.shape.num_weights - narrow)


def _states_on_gpu(job: Job, candidate: Candidate) -> tuple[float, float, float]:
    """The part of `states` that is on the GPU."""
    return (0.0, 0.0, 0.0) if candidate.offload_states else states(job)


def _accumulates(job: Job, candidate: Candidate) -> bool:
    """Says whether a step has several forwards: from the second on all gradients are there."""
    return job.forwards(candidate.sequence_degree) > 1


def _gathered(job: Job, layer_weights: int) -> float:
    """Bytes that FSDP has gathered: weights of whole layers, and the head with the norm before it,
    which stays whole from its use to the end."""
    if not job.fsdp:
        return 0.0
    return BF16 * (layer_weights + job.shape.head_weights)


def _cast(job: Job, linear_weights: int) -> float:
    """Bytes of the bfloat16 copies that autocast makes of float32 weights for backward."""
    return 0.0 if job.fsdp or job.dtype != "float32" else BF16 * linear_weights


def _not_recomputed(job: Job, candidate: Candidate, until: int) -> int:
    """Linear weights of the layers before layer `until` that run once."""
    policies = candidate.policies[:until]
    return sum(
        kind.linear_weights
        for kind, policy in zip(job.shape.layers, policies, strict=False)
        if not POLICIES[policy].recomputes_layer
    )


def _factors(job: Job, candidate: Candidate, until: int) -> float:
    """Bytes of the copies that experts' adapters keep of their factors for backward, in layers
    before layer `until` that run once; of float32 factors there are two."""
    if not job.lora:
        return 0.0
    layers = zip(job.shape.layers, candidate.policies[:until], strict=False)
    sides = sum(kind.expert_sides for kind, p in layers if not POLICIES[p].recomputes_layer)
    return float((1 if job.fsdp else 2) * BF16 * job.lora_rank * sides)


def _kept(job: Job, candidate: Candidate, tokens: float, until: int) -> float:
    """Bytes kept by every layer before layer `until`."""
    policies = candidate.policies[:until]
    others = list(zip(policies, _bytes_of_layers(job, candidate), strict=False))
    kept = tokens * sum(kept_bytes(policy, candidate, layer) for policy, layer in others)
    # Backward comes to the last layer on the host first.
    on_host = [layer for policy, layer in others if POLICIES[policy].on_host]
    coming = tokens * checkpoint_bytes(candidate, on_host[-1]) if on_host else 0.0
    comes_ahead = coming <= AHEAD * job.cluster.hardware.memory_bytes
    return kept + (coming if comes_ahead else 0.0)


def _loss(job: Job, candidate: Candidate, tokens: float) -> Components:
    """Memory while the loss is computed."""
    shape = job.shape
    weights, gradients, optimizer = _states_on_gpu(job, candidate)
    chunk = min(CHUNK_BYTES, FP32 * shape.vocab_size * tokens)
    head = FP32 * shape.head_weights if job.trains_head else 0
    # FSDP holds the buffer of its last gathering, beside the weights, until the next one.
    buffer: float = BF16 * shape.head_weights if job.fsdp else 0
    # Autocast drops copies of trained weights when forward ends, those of frozen weights at once.
    alive = (
        _not_recomputed(job, candidate, shape.num_layers)
        if job.lora
        else shape.linear_weights_in_layers
    )
    buffer += _cast(job, alive + shape.head_weights)
    return Components(
        weights=weights + _gathered(job, 0) + buffer + _factors(job, candidate, shape.num_layers),
        gradients=head + (gradients if _accumulates(job, candidate) else 0.0),
        optimizer=optimizer,
        checkpoints=_kept(job, candidate, tokens, until=shape.num_layers),
        layer=4 * BF16 * shape.hidden_size * tokens,
        attention=0.0,
        communication=0.0,
        logits=chunk,
    )


def _backward(
    job: Job, candidate: Candidate, tokens: float, buffer_bytes: float, number: int
) -> Components:
    """Memory while backward goes through layer `number`, counted from 0."""
    shape, kind = job.shape, job.shape.layers[number]
    layer = layer_bytes(job, candidate, kind)
    weights, gradients, optimizer = _states_on_gpu(job, candidate)
    trained_here = kind.weights * (0 if job.lora else 1)
    head = BF16 * shape.head_weights if job.trains_head else 0
    done = gradients if _accumulates(job, candidate) else gradients * _share_done(job, number)
    # What was kept of attention is there beside what is computed again for the other tokens.
    recomputes_some = 0 < candidate.attention_kept < 1
    keeps = POLICIES[candidate.policies[number]].keeps_attention
    kept_beside = candidate.attention_kept * layer.results if recomputes_some and keeps else 0.0
    at_mlp = layer.whole + layer.passing + kept_beside
    is_shared, own = candidate.sequence_degree > 1, mixer_gradients(job, candidate, kind, tokens)
    buffers = mixer_buffers(candidate, kind, tokens, buffer_bytes)
    # The residual's gradient takes the place of what the MLP and its norm kept, on one GPU.
    held = layer.mixer - (0 if is_shared else layer.input) + kept_beside
    at_mixer = held + own + buffers / max(tokens, 1)
    in_mlp = at_mlp >= at_mixer
    alive = kind.linear_weights + _not_recomputed(job, candidate, number)
    here = BF16 * trained_here if job.fsdp or not done else 0.0
    if in_mlp and candidate.mlp_tiles > 1 and not job.lora:
        # The MLP's gradients are summed over tiles in float32; those of attention come later.
        here = float(FP32 * shape.num_mlp_products * shape.down_weights)
    # FSDP gathers the layer before this one too and, as at the loss, holds the buffer of its last
    # gathering.
    before = shape.layers[number - 1].weights if number else 0
    buffer = BF16 * (before or kind.weights) if job.fsdp else 0
    return Components(
        weights=weights
        + _gathered(job, kind.weights + before)
        + buffer
        + _cast(job, alive)
        + _factors(job, candidate, number + 1),
        gradients=done + head + here,
        optimizer=optimizer,
        checkpoints=_kept(job, candidate, tokens, until=number),
        layer=tokens * (at_mlp if in_mlp else held),
        attention=0.0 if in_mlp else own * tokens,
        communication=0.0 if in_mlp else buffers,
        logits=0.0,
    )


def _share_done(job: Job, number: int) -> float:
    """The share of all gradients that is there when backward comes to a layer: those of the layers
    after it. An adapter's, which are few, count in full after the last layer."""
    layers = job.shape.layers
    if number == len(layers) - 1:
        return 0.0
    if job.lora:
        return 1.0
    outside = job.shape.num_weights - job.shape.weights_in_layers
    still_missing = outside + sum(kind.weights for kind in layers[: number + 1])
    return 1 - min(1.0, still_missing / job.trained_weights)


def loading_bytes(job: Job, candidate: Candidate) -> float:
    """Bytes of one machine's host while weights are loaded, of all its processes together, beside
    what the processes themselves take.

    Under FSDP2 each process reads its own rows from safetensors through its readers' buffers, and
    they stay on the host where states do. Otherwise each process holds the whole model, unless it
    has 4 bits: then weights go to the GPU one by one.
    """
    if job.fsdp:
        rows = states(job)[0] if candidate.offload_states else 0.0
        objects = LAYER_OBJECTS_BYTES * job.shape.num_layers
        of_one = rows + READERS * BLOCK_BYTES + objects
    else:
        of_one = 0.0 if job.dtype == "nf4" else loaded_bytes(job)
    return of_one * job.cluster.gpus_per_node


def how_loaded(job: Job) -> str:
    """Who reads what, in words."""
    if job.fsdp:
        return "each process reads its own rows of safetensors"
    if job.dtype == "nf4":
        return "each process quantises weights on its GPU, one by one"
    return "every process holds the whole model"
