"""Bytes of a training step on one GPU and its host, by component, predicted.

The tensors that autograd keeps were counted in the code that runs. With Liger Kernel's operators a
layer keeps for each token seven tensors of the hidden size (its input, two norms' outputs, the
residual in between, q, and attention's output, under Ulysses twice: as heads for attention, as
tokens for the product after it), k and v, three of the MLP's size, lse, and one number per norm. On
H200s `checkpoint="auto"` measured 147,592 bytes per token for a layer of Llama-3.1-8B under
Ulysses, which is what this module gives.

A step has three moments at which it can peak, and the largest is the prediction:

- **loss**: everything kept is alive, and the head works on a chunk of logits;
- **backward of the last layer**: the other layers' tensors are still kept, and this layer has all
  of its own;
- **backward of the first layer**: all gradients are there.

In a step of several forwards all gradients are there at each of them, from the second forward on.
"""

from dataclasses import dataclass

from longctx_patch.kernels.run import parts_that_fit
from longctx_patch.loss.linear_head import CHUNK_BYTES
from longctx_patch.memory.limits import AHEAD
from longctx_patch.memory.policies import POLICIES, LayerPolicy, count_on_host, count_recomputed
from longctx_patch.predict.run.candidate import Candidate, Job
from longctx_patch.predict.run.parts import Parts

BF16, FP32 = 2, 4
NF4 = 0.516
"""Bytes of a weight: 4 bits, a scale of 8 for each 64 weights, one of 32 for each 256 scales
(QLoRA)."""


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
    """Buffers of attention's backward: gradients and sums."""
    communication: float
    """Blocks that arrive from other ranks or leave for them."""
    logits: float


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for each token of a rank."""

    attention: float
    """Kept by attention and what surrounds it."""
    mlp: float
    """Kept by the MLP's inner tensors."""
    results: float
    """Attention's output and lse, kept by a layer that is recomputed except for attention."""
    input: float
    """The layer's input."""
    passing: float
    """What backward of the MLP holds beside what was kept."""

    @property
    def whole(self) -> float:
        """What a layer keeps if nothing of it is recomputed."""
        return self.attention + self.mlp


def layer_bytes(job: Job, candidate: Candidate) -> LayerBytes:
    """Count what autograd keeps of one layer, tensor by tensor."""
    shape, mlp_tiles = job.shape, candidate.mlp_tiles
    hidden, inner = BF16 * shape.hidden_size, BF16 * shape.intermediate_size
    query = BF16 * shape.num_heads * shape.head_dim
    kv = BF16 * shape.num_kv_heads * shape.head_dim
    lse = FP32 * shape.num_heads
    # Each norm keeps its input, and attention and the MLP keep theirs: outputs of norms or, in
    # models that norm after attention and the MLP, the sums that go into them.
    in_norms = shape.num_norms * hidden + (query + kv if shape.has_head_norms else 0)
    # Under Ulysses, attention's output is kept as heads, too.
    results = (2 if candidate.ulysses > 1 else 1) * query
    attention = min(shape.num_norms, 2) * hidden + in_norms + query + 2 * kv + results + lse
    attention += FP32 * shape.num_norms
    attention += FP32 * (shape.num_heads + shape.num_kv_heads) if shape.has_head_norms else 0
    mlp = shape.num_mlp_products * inner
    passing = inner + hidden
    if not job.fused_layers:
        # Norms keep their input in float32 in place of the model's dtype, and also their output
        # before the weight. silu keeps its result; its gradient is beside the one that came in.
        attention += FP32 // BF16 * in_norms
        mlp += inner * (shape.num_mlp_products - 2)
        passing += inner * (shape.num_mlp_products - 2)
    if job.lora:
        # Adapters keep the inputs of their layers, which are there already, and tensors of their
        # rank in between.
        attention += 7 * BF16 * job.lora_rank
        if not job.fsdp:
            # Adapters are float32: each converts its input, which autocast makes bfloat16 again.
            attention += 3 * hidden
            passing += (FP32 + BF16) * shape.intermediate_size
    return LayerBytes(
        attention=attention,
        mlp=mlp if mlp_tiles == 1 else 0.0,
        results=query + lse,
        input=hidden,
        # Gradients of an MLP's input and output are whole even if its inner tensors are tiled.
        passing=passing if mlp_tiles == 1 else 2 * hidden + (mlp + passing) / mlp_tiles,
    )


def checkpoint_bytes(candidate: Candidate, layer: LayerBytes) -> float:
    """Bytes for each token, on the GPU or the host, of a layer recomputed without attention."""
    return layer.input + candidate.attention_kept * layer.results


def kept_bytes(policy: LayerPolicy, candidate: Candidate, layer: LayerBytes) -> float:
    """Bytes for each token that a layer keeps on the GPU while other layers are computed."""
    record = POLICIES[policy]
    if not record.recomputes_layer:
        return layer.whole
    if record.on_host:
        return 0.0
    return checkpoint_bytes(candidate, layer) if record.keeps_attention else layer.input


def predict_memory(
    job: Job, candidate: Candidate, tokens: float, buffer_bytes: float
) -> Components:
    """Memory at the moment that needs most.

    Args:
        tokens: number of tokens of one rank.
        buffer_bytes: bytes that the attention plan holds of other ranks.
    """
    moments = (
        _loss(job, candidate, tokens),
        _backward(job, candidate, tokens, buffer_bytes, is_last_layer=True),
        _backward(job, candidate, tokens, buffer_bytes, is_last_layer=False),
    )
    return max(moments, key=lambda components: components.total)


def host_bytes(job: Job, candidate: Candidate, tokens: float) -> float:
    """Bytes of one machine's host, of all its processes together."""
    offloaded = count_on_host(candidate.policies)
    layer = layer_bytes(job, candidate)
    per_gpu = offloaded * checkpoint_bytes(candidate, layer) * tokens
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
    """Bytes of the whole model as it is loaded."""
    if job.dtype != "nf4":
        return (FP32 if job.dtype == "float32" else BF16) * job.shape.num_weights
    narrow = job.shape.num_layers * job.shape.layer_linear_weights
    return NF4 * narrow + BF16 * (job.shape.num_weights - narrow)


def _states_on_gpu(job: Job, candidate: Candidate) -> tuple[float, float, float]:
    """The part of `states` that is on the GPU."""
    return (0.0, 0.0, 0.0) if candidate.offload_states else states(job)


def _accumulates(job: Job, candidate: Candidate) -> bool:
    """Whether a step has several forwards, so that all gradients are there from the second on."""
    return job.forwards(candidate.sequence_degree) > 1


def _gathered(job: Job, num_layers: int) -> float:
    """Bytes that FSDP has gathered: whole layers, and the head with the norm before it, which
    stays whole from its use to the end."""
    if not job.fsdp:
        return 0.0
    return BF16 * (num_layers * job.shape.layer_weights + job.shape.head_weights)


def _cast(job: Job, num_layers: int, head: int) -> float:
    """Bytes of the bfloat16 copies that autocast makes of float32 weights for backward."""
    if job.fsdp or job.dtype != "float32":
        return 0.0
    return BF16 * (num_layers * job.shape.layer_linear_weights + head)


def _kept(job: Job, candidate: Candidate, tokens: float, skipped: int) -> float:
    """Bytes kept by every layer except the last `skipped` ones."""
    layer = layer_bytes(job, candidate)
    others = candidate.policies[: len(candidate.policies) - skipped]
    kept = sum(kept_bytes(policy, candidate, layer) for policy in others)
    coming = tokens * checkpoint_bytes(candidate, layer)
    comes_ahead = count_on_host(others) and coming <= AHEAD * job.cluster.hardware.memory_bytes
    return tokens * kept + (coming if comes_ahead else 0.0)


def _loss(job: Job, candidate: Candidate, tokens: float) -> Components:
    """Memory while the loss is computed."""
    shape = job.shape
    weights, gradients, optimizer = _states_on_gpu(job, candidate)
    chunk = min(CHUNK_BYTES, FP32 * shape.vocab_size * tokens)
    head = 0 if job.lora else FP32 * shape.head_weights
    # FSDP holds the buffer of its last gathering, beside the weights, until the next one.
    buffer: float = BF16 * shape.head_weights if job.fsdp else 0
    # Autocast drops copies of trained weights when forward ends, those of frozen weights at once.
    alive = shape.num_layers - (count_recomputed(candidate.policies) if job.lora else 0)
    buffer += _cast(job, alive, shape.head_weights)
    return Components(
        weights=weights + _gathered(job, 0) + buffer,
        gradients=head + (gradients if _accumulates(job, candidate) else 0.0),
        optimizer=optimizer,
        checkpoints=_kept(job, candidate, tokens, skipped=0),
        layer=4 * BF16 * shape.hidden_size * tokens,
        attention=0.0,
        communication=0.0,
        logits=chunk,
    )


def _backward(
    job: Job, candidate: Candidate, tokens: float, buffer_bytes: float, *, is_last_layer: bool
) -> Components:
    """Memory while backward goes through the last layer, or through the first."""
    shape, layer = job.shape, layer_bytes(job, candidate)
    weights, gradients, optimizer = _states_on_gpu(job, candidate)
    trained_here = shape.layer_weights * (0 if job.lora else 1)
    head = 0 if job.lora else BF16 * shape.head_weights
    outside = 0 if job.lora else shape.num_weights - shape.num_layers * shape.layer_weights
    if is_last_layer:
        skipped, done = 1, 0.0
    else:
        skipped, done = shape.num_layers, gradients * (1 - _share(outside + trained_here, job))
    if _accumulates(job, candidate):
        done = gradients
    # What was kept of attention is there beside what is computed again for the other tokens.
    recomputes_some = 0 < candidate.attention_kept < 1
    keeps = POLICIES[candidate.policies[-1 if is_last_layer else 0]].keeps_attention
    kept_beside = candidate.attention_kept * layer.results if recomputes_some and keeps else 0.0
    at_mlp = layer.whole + layer.passing + kept_beside
    is_shared, own = candidate.sequence_degree > 1, _attention_gradients(job, candidate, tokens)
    # The residual's gradient takes the place of what the MLP and its norm kept, on one GPU.
    held = layer.attention - (0 if is_shared else layer.input) + kept_beside
    at_attention = held + own + buffer_bytes / max(tokens, 1)
    in_mlp = at_mlp >= at_attention
    others = candidate.policies[: shape.num_layers - skipped]
    alive = 1 + len(others) - count_recomputed(others)
    here = BF16 * trained_here if job.fsdp or not done else 0.0
    if in_mlp and candidate.mlp_tiles > 1 and not job.lora:
        # The MLP's gradients are summed over tiles in float32; those of attention come later.
        here = float(FP32 * shape.num_mlp_products * shape.down_weights)
    # As at the loss, FSDP holds the buffer of its last gathering.
    buffer = BF16 * shape.layer_weights if job.fsdp else 0
    return Components(
        weights=weights + _gathered(job, 2 if is_last_layer else 1) + buffer + _cast(job, alive, 0),
        gradients=done + head + here,
        optimizer=optimizer,
        checkpoints=_kept(job, candidate, tokens, skipped=skipped),
        layer=tokens * (at_mlp if in_mlp else held),
        attention=0.0 if in_mlp else own * tokens,
        communication=0.0 if in_mlp else buffer_bytes,
        logits=0.0,
    )


def _attention_gradients(job: Job, candidate: Candidate, tokens: float) -> float:
    """Bytes for each token in backward of attention: gradients of out, q, k and v, and dq once more
    in float32. Where ranks share a row, a tensor of q's size travels besides."""
    query = job.shape.num_heads * job.shape.head_dim
    kv = job.shape.num_kv_heads * job.shape.head_dim
    kv_heads = max(1, job.shape.num_kv_heads // candidate.ulysses)
    parts = parts_that_fit(int(query * tokens), job.cluster.hardware.memory_bytes, kv_heads)
    in_a_part = (FP32 * query + (BF16 * (query + 2 * kv) if parts > 1 else 0)) / parts
    queries = 3 if candidate.sequence_degree > 1 else 2
    return BF16 * (queries * query + 2 * kv) + in_a_part


def _share(weights: int, job: Job) -> float:
    """`weights` as a share of the trained weights; 0 under an adapter."""
    return min(1.0, weights / job.trained_weights) if not job.lora else 0.0
