"""Bytes that one decoder layer keeps for backward, and holds in it, for each token of a rank.

The tensors that autograd keeps were counted in the code that runs. With Liger Kernel's operators a
layer keeps for each token seven tensors of the hidden size (its input, two norms' outputs, the
residual in between, q, and attention's output, under Ulysses twice: as heads for attention, as
tokens for the product after it), k and v, three of the MLP's size, lse, and one number per norm. On
H200s `checkpoint="auto"` measured 147,592 bytes per token for a layer of Llama-3.1-8B under
Ulysses, which is what this module gives.

On H100s it measured what layers of Qwen3.5-9B's widths keep more than recomputed ones do, which is
what this module gives too: 209,608 bytes of a gated delta net and 145,496 of a layer with gated
attention, with Liger Kernel. Without it they are 283,337 and, with the layer's output that such a
measure has, 258,137, to a byte. Of Qwen3.5-35B-A3B's under an adapter, with frozen experts, an H200
measured 186,544 and 135,903; here they are 186,554 and 135,810.
"""

from dataclasses import dataclass

from longctx_patch.kernels.run import parts_that_fit
from longctx_patch.memory.policies import POLICIES, LayerPolicy
from longctx_patch.planner.job import Candidate, Job
from longctx_patch.planner.model_shape import ExpertShape, LayerShape
from longctx_patch.plans.recurrent import DELTA_CHUNK, RecurrentShape

BF16, FP32, INDEX = 2, 4, 8


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for each token of a rank."""

    mixer: float
    """Kept by attention, or the recurrence, and what surrounds it."""
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
        """Returns what a layer keeps if nothing of it is recomputed."""
        return self.mixer + self.mlp


def layer_bytes(job: Job, candidate: Candidate, kind: LayerShape) -> LayerBytes:
    """Count what autograd keeps of one layer, tensor by tensor."""
    shape, mlp_tiles = job.shape, candidate.mlp_tiles
    hidden, inner = BF16 * shape.hidden_size, BF16 * shape.intermediate_size
    # Each norm keeps its input, and the mixer and the MLP keep theirs: outputs of norms or, in
    # models that norm after attention and the MLP, the sums that go into them.
    in_norms = kind.num_norms * hidden + BF16 * shape.head_dim * _num_head_norms(job, kind)
    mixer: float = min(kind.num_norms, 2) * hidden + in_norms + FP32 * kind.num_norms
    results = 0.0
    if kind.recurrence is None:
        results = BF16 * shape.num_heads * shape.head_dim + FP32 * shape.num_heads
        mixer += _attention(job, candidate, kind)
    else:
        mixer += _delta_net(job, kind.recurrence, candidate)
    mlp: float = shape.num_mlp_products * inner
    passing: float = inner + hidden
    if kind.experts is not None:
        mlp, passing = _experts(job, kind.experts)
    if not job.fused_layers:
        # Norms keep their input in float32 in place of the model's dtype and, if their weight is
        # trained, their output before it. silu keeps its result; its gradient is beside the one
        # that came in.
        before_weight = 2 if kind.has_wide_norms else 1
        mixer += in_norms * (1 if job.lora else 1 + before_weight)
        more = 0 if kind.experts is not None else inner * (shape.num_mlp_products - 2)
        mlp += more
        passing += more
    if job.lora:
        # Adapters keep the inputs of their layers, which are there already, and tensors of their
        # rank in between.
        mixer += 7 * BF16 * job.lora_rank
        if job.dtype == "nf4":
            # PEFT's own code, with float32 adapters: each converts its input, which autocast makes
            # bfloat16 again.
            mixer += 3 * hidden
            passing += (FP32 + BF16) * shape.intermediate_size
    return LayerBytes(
        mixer=mixer,
        mlp=mlp if mlp_tiles == 1 else 0.0,
        results=results,
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


def mixer_buffers(
    candidate: Candidate, kind: LayerShape, tokens: float, attention_bytes: float
) -> float:
    """Bytes of what arrives from other ranks or leaves for them in backward of a layer's mixer.
    Where heads are exchanged for a recurrence, that is its inputs and its output, on both sides;
    states are few."""
    shape, found = kind.recurrence, candidate.recurrence
    if shape is None:
        return attention_bytes
    if found is None or found.way == "states":
        return 0.0
    keys, values = shape.num_groups * shape.key_dim, shape.num_heads * shape.value_dim
    return 2 * BF16 * tokens * (2 * keys + 2 * values)


def mixer_gradients(job: Job, candidate: Candidate, kind: LayerShape, tokens: float) -> float:
    """Bytes for each token in backward of a layer's mixer, beside what was kept."""
    if kind.recurrence is None:
        return _attention_gradients(job, candidate, tokens)
    return _delta_net_gradients(kind.recurrence)


def _experts(job: Job, experts: ExpertShape) -> tuple[float, float]:
    """Returns bytes of a token (kept, held in backward beside that) by transformers' grouped
    products. A token counts once for each expert that it goes through, so they don't depend on how
    tokens are spread over experts."""
    hidden, inner = BF16 * job.shape.hidden_size, BF16 * experts.width
    # Gate and up, silu; the result before its weight, which the weight's gradient asks for.
    kept: float = 3 * inner + hidden
    # What goes into the products, the token and silu times up: frozen ones don't keep it.
    kept += hidden if experts.gate_up_ranks or not job.lora else 0
    kept += inner if experts.down_ranks or not job.lora else 0
    if job.lora:  # what is between an adapter's factors, of both products
        kept += (experts.gate_up_ranks + experts.down_ranks) * BF16 * job.lora_rank
    # Places of the token in three orders, its expert, and its weight.
    kept += 4 * INDEX + BF16
    # The router's probabilities, in float32.
    probabilities = FP32 * experts.num_experts
    # Gradients of the result, before and after the weight, and their product with it.
    held: float = 3 * hidden
    if experts.has_wide_weights:
        kept += BF16
        held = (3 * FP32 + BF16) * job.shape.hidden_size
    whole = experts.num_chosen * kept + probabilities
    if experts.shared_width:  # gate and up, silu, their product; its result and its gate's weight
        whole += BF16 * (4 * experts.shared_width + job.shape.hidden_size + 1)
    return whole, experts.num_chosen * held


def _num_head_norms(job: Job, kind: LayerShape) -> int:
    return job.shape.num_heads + job.shape.num_kv_heads if kind.has_head_norms else 0


def _attention(job: Job, candidate: Candidate, kind: LayerShape) -> float:
    """q, k and v, as they come from their products and as attention takes them, its output and
    lse."""
    shape = job.shape
    query = BF16 * shape.num_heads * shape.head_dim
    kv = BF16 * shape.num_kv_heads * shape.head_dim
    # Under Ulysses, attention's output is kept as heads, too. cuDNN gives it in the layout of q,
    # which partial rotary embeddings lay out by heads, so that the product with a gate keeps a
    # copy; a ring sums its output up by tokens.
    is_copied = kind.has_gate and candidate.ring == 1
    results = (2 if candidate.ulysses > 1 or is_copied else 1) * query
    # The sigmoid of the gate, and its product with the output.
    gate = 2 * query if kind.has_gate else 0
    lse = FP32 * shape.num_heads
    return query + 2 * kv + results + gate + lse + FP32 * _num_head_norms(job, kind)


def _delta_net(job: Job, shape: RecurrentShape, candidate: Candidate) -> float:
    """A gated delta net between the norm before it and the residual after it: what transformers'
    module, causal-conv1d and flash-linear-attention's chunk_gated_delta_rule save. Tokens whose map
    is found go through the kernel once more, with the columns of the map beside their values."""
    heads = shape.num_heads
    key, value = shape.num_groups * shape.key_dim, heads * shape.value_dim
    # The convolution keeps what goes in; its output is copied for the kernel, part by part.
    convolution = BF16 * (2 * key + value)
    # Of each head the decay before and after softplus, and the sigmoid that weighs the values.
    decays = heads * (2 * FP32 + BF16)
    # The norm of the output by its gate is torch's with Liger Kernel, too: its input in float32
    # with a number per head, the result in bfloat16 after its weight and, if that is trained,
    # before it, the gate before and after silu in float32. Then the product that follows.
    results = BF16 * (1 if job.lora else 2)
    gated_norm = value * (FP32 + results + 2 * FP32) + FP32 * heads + BF16 * value
    kept = convolution + decays + _delta_kernel(shape) + gated_norm
    if candidate.recurrence is not None:
        mapped = _delta_kernel(shape, shape.value_dim + shape.key_dim)
        kept += candidate.recurrence.mapped_share * mapped
    return kept


def _delta_kernel(shape: RecurrentShape, value_dim: int | None = None) -> float:
    """Saved by the kernel: keys and queries of length 1 with what scaled them, values, summed
    decays, and a row of each chunk's matrix."""
    heads = shape.num_heads
    keys = 2 * shape.num_groups * (BF16 * shape.key_dim + FP32)
    values = BF16 * heads * (shape.value_dim if value_dim is None else value_dim)
    return keys + values + heads * (FP32 + BF16 * DELTA_CHUNK)


def _delta_net_gradients(shape: RecurrentShape) -> float:
    """The larger of two moments: the gated norm's backward (float32 gradients of its output and of
    both factors, and one in bfloat16), and the kernel's, when what the norm kept is gone. The
    kernel finds chunks' inner tensors and states again: five of the size of keys and four of values
    with their gradients, and states twice."""
    heads = shape.num_heads
    key, value = BF16 * heads * shape.key_dim, BF16 * heads * shape.value_dim
    states = BF16 * shape.state_numbers / DELTA_CHUNK
    # Beside the kernel's there are the gradients of its output and of the gate.
    in_kernel = 5 * key + 4 * value + 2 * states + 2 * value - 9 * value
    return max(7 * value, in_kernel)


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
