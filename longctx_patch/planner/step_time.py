"""Seconds of a training step, by part, predicted.

Attention comes from the simulation of its plan (`longctx_patch.planner.attention_cost`), and
recurrences from their FLOPs and exchanges (`longctx_patch.planner.recurrent_cost`). Matrix products
run at the rate that they reach inside of a step, everything between them at the bandwidth of
memory. FSDP's messages hide behind layers; its copies and its last reduction don't.
"""

from collections import Counter
from dataclasses import dataclass

from longctx_patch.memory.policies import POLICIES, LayerPolicy
from longctx_patch.planner.attention_cost import Prediction, predict
from longctx_patch.planner.job import Candidate, Job, Parts
from longctx_patch.planner.layer_bytes import BF16, FP32, checkpoint_bytes, layer_bytes
from longctx_patch.planner.model_shape import ExpertShape, LayerShape
from longctx_patch.planner.recurrent_cost import recompute_under
from longctx_patch.planner.step_memory import states
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.recurrent import RecurrentShape

ELEMENTWISE_SHARE = 0.77
"""Share of the bandwidth of copies that norms, rotary embeddings, SwiGLU and residuals reach: 49 ms
of a step of 131,072 tokens and 8 layers of Llama-3.1-8B on 4 H200."""
UNFUSED = 3.0
"""The factor by which more bytes move where each of these is several of torch's operations."""
GATED_NORM_BYTES = 66
"""Bytes that the gated norm of a delta net's output moves for each number: ten of torch's
operators read and write bfloat16 and float32."""
GATE_BYTES = 22
"""Bytes that the gate of an attention layer moves for each number of its queries: it and the
queries are copied from one product, the sigmoid, attention's output copied, their product."""
GROUPED_SHARE = 0.8
"""Share of the rate of matrix products that those of experts reach where each has many tokens:
assumed. With their adapters' small products, those of Qwen3-30B-A3B took 1.24 times as long on
H200 as is predicted, and what is between products 0.7 times as long."""
GROUPED_ROWS = 128
"""Tokens to which a kernel fills up the tokens of each expert: half of them on the average."""
LOSS_BYTES = 10
"""Bytes that the softmax and its gradient move for each logit."""
FSDP_BYTES = 24
"""Bytes that FSDP copies into and out of its buffers for each weight, forward and backward."""
ADAMW_BYTES = 56
"""Bytes that AdamW reads and writes for each weight, at the bandwidth of copies."""
HOST_ADAMW_BYTES = 28
"""Bytes that AdamW reads and writes for each weight on the host."""
HOST_ADAMW_BYTES_PER_S = 110e9
"""Bytes per second of torch's fused AdamW for each GPU, on 16 cores of a host with one H200."""
HOST_CLIP_BYTES_PER_S = 8e9
"""Bytes per second of clipping float32 gradients on that host."""
HOST_LAYER_S = 1.1e-3
"""Seconds that a host takes to start a layer's kernels beside those of its mixer, forward or
backward; where the layer is recomputed, 2.5 times as much. From steps of small models on H100."""
HOST_FSDP_S = 1.8e-3, 2.6e-3
"""Seconds more where FSDP2 gathers a layer's weights, and reduces its gradients: forward,
backward."""
HOST_IN_STEP = 4.7
"""How much longer a host takes to start attention's calls and messages within a step than one after
another, where their code and what they allocate are in its caches."""
IDLE_S = 7e-3
"""Seconds of a step without work: the optimizer's start, the loss's way to the host."""


@dataclass(frozen=True, kw_only=True)
class StepTime(Parts):
    """Seconds of a step; each instant counts in one part only."""

    attention: float
    recurrence: float
    """Kernels of recurrent layers, and what ranks exchange for them."""
    linear: float
    elementwise: float
    loss: float
    fsdp: float
    offload: float
    """Copies to and from the host that layers don't hide."""
    optimizer: float
    host: float
    """Seconds in which GPUs wait for hosts, which start kernels more slowly than they run."""
    idle: float = IDLE_S


@dataclass(frozen=True)
class Attention:
    """Holds what the cost model says of one layer's attention."""

    forward: Prediction
    backward: Prediction

    @property
    def buffer_bytes(self) -> int:
        """Most bytes of others' blocks and of results under way, on the rank that holds most."""
        return max(self.forward.peak_buffer_bytes, self.backward.peak_buffer_bytes)


def predict_attention(job: Job, setting: Setting) -> Attention:
    """Simulate one layer's attention of a row with the plans that were decided."""
    hardware = job.cluster.seen_by(setting.ulysses_degree * setting.ring_degree)
    return Attention(*(predict(setting, way, job.workload, hardware) for way in Direction))


def predict_time(job: Job, candidate: Candidate, tokens: float, attention: Attention) -> StepTime:
    """Seconds of a step, where a rank has so many `tokens` of a row.

    Every forward of a step is followed by its backward, and FSDP2 gathers weights and reduces
    gradients in each. The optimizer steps once.
    """
    forwards = job.forwards(candidate.sequence_degree)
    shape, machine = job.shape, job.cluster.hardware
    products_s = _products(job, candidate, tokens) / machine.matmul_flops
    products_s += _experts_seconds(job, candidate, tokens)
    moved = tokens * sum(
        number * (3 * _elementwise_bytes(job, kind)) for kind, number in shape.kinds.items()
    )
    moved += tokens * sum(_elementwise_bytes(job, kind) for kind in _recomputed(job, candidate))
    head, bandwidth = shape.head_weights, machine.copy_bandwidth
    # FLOPs for each weight: two forward, two for the input's gradient, two more if it is trained.
    each = 6 if job.trains_head else 4
    layers = {
        "attention": _attention_seconds(job, candidate, attention),
        "recurrence": _recurrence_seconds(job, candidate),
        "linear": products_s,
        "elementwise": moved / (ELEMENTWISE_SHARE * bandwidth),
        "host": 0.0,
    }
    layers["host"] = _host_seconds(job, candidate, tokens, attention, sum(layers.values()))
    return StepTime(
        **{name: forwards * seconds for name, seconds in layers.items()},
        loss=forwards
        * tokens
        * (each * head / machine.matmul_flops + LOSS_BYTES * shape.vocab_size / bandwidth),
        fsdp=forwards * _fsdp_seconds(job, products_s),
        offload=forwards * _offload_seconds(job, candidate, tokens, attention),
        optimizer=_optimizer_seconds(job, candidate),
    )


def _recomputed(job: Job, candidate: Candidate) -> list[LayerShape]:
    """The layers that run again in backward."""
    return [kind for kind, policy in _with_policies(job, candidate) if _runs_again(policy)]


def _with_policies(job: Job, candidate: Candidate) -> list[tuple[LayerShape, LayerPolicy]]:
    return list(zip(job.shape.layers, candidate.policies, strict=True))


def _runs_again(policy: LayerPolicy) -> bool:
    return POLICIES[policy].recomputes_layer


def _products(job: Job, candidate: Candidate, tokens: float) -> float:
    """FLOPs of the layers' matrix products."""
    shape, again = job.shape, _recomputed(job, candidate)
    each = 4 if job.lora else 6
    recomputed = sum(kind.dense_weights - shape.down_weights for kind in again)
    if candidate.mlp_tiles > 1:  # backward runs each tile's MLP again, in whole layers too
        whole = shape.num_layers - len(again)
        recomputed += whole * (shape.num_mlp_products - 1) * shape.down_weights
        if job.lora:  # the last product too, since an adapter follows it
            recomputed += shape.num_layers * shape.down_weights
    return tokens * (each * shape.dense_weights_in_layers + 2 * recomputed)


def _experts_seconds(job: Job, candidate: Candidate, tokens: float) -> float:
    """Seconds of all experts' products."""
    again, each, seconds = Counter(_recomputed(job, candidate)), 4 if job.lora else 6, 0.0
    for kind, number in job.shape.kinds.items():
        seconds += (each / 2 * number + again[kind]) * _experts_forward_s(job, kind, tokens)
    return seconds


def _experts_forward_s(job: Job, kind: LayerShape, tokens: float) -> float:
    """Seconds of the products of one layer's experts, forward."""
    if kind.experts is None:
        return 0.0
    rows = tokens * kind.experts.num_chosen + kind.experts.num_experts * GROUPED_ROWS / 2
    rate = GROUPED_SHARE * job.cluster.hardware.matmul_flops
    return 2 * rows * kind.expert_weights / kind.experts.num_experts / rate


def _attention_seconds(job: Job, candidate: Candidate, attention: Attention) -> float:
    policies = [policy for kind, policy in _with_policies(job, candidate) if not kind.recurrence]
    forward_s, backward_s = attention.forward.makespan_s, attention.backward.makespan_s
    again = sum(map(_runs_again, policies))
    keeps = sum(POLICIES[policy].keeps_attention for policy in policies)
    runs_again = again - keeps + keeps * (1 - candidate.attention_kept) ** 2
    return len(policies) * (forward_s + backward_s) + runs_again * forward_s


def _recurrence_seconds(job: Job, candidate: Candidate) -> float:
    found = candidate.recurrence
    policies = [policy for kind, policy in _with_policies(job, candidate) if kind.recurrence]
    if found is None or not policies:
        return 0.0
    ways = Counter(recompute_under(policy, candidate.attention_kept) for policy in policies)
    return sum(number * found.seconds(recompute) for recompute, number in ways.items())


def _elementwise_bytes(job: Job, kind: LayerShape) -> float:
    """Bytes for each token that a layer's forward moves beside matrix products and its mixer's
    kernel: two norms, two residuals, SwiGLU, and what surrounds the kernel."""
    shape = job.shape
    # An adapter reads a layer's input once more, and adds to its output; in float32 beside weights
    # of 4 bits.
    adapters = (4 if job.dtype == "nf4" else 2) * BF16 * kind.active_sides if job.lora else 0
    fusable, other = 10 * shape.hidden_size + 3 * shape.intermediate_size, 0.0
    if kind.recurrence is None:  # rotary embeddings, and heads
        fusable += 4 * shape.hidden_size + 2 * shape.num_kv_heads * shape.head_dim
    else:
        other = _delta_net_bytes(kind.recurrence)
    if kind.experts is not None:
        other += _experts_bytes(job, kind.experts)
    if kind.has_gate:
        other += GATE_BYTES * shape.num_heads * shape.head_dim
    moved = BF16 * fusable * (1 if job.fused_layers else UNFUSED)
    return moved + other + adapters


def _experts_bytes(job: Job, experts: ExpertShape) -> float:
    """Bytes for each token that a forward moves around experts' products, in torch's operators:
    tokens are brought together, gated, weighted, brought back and summed up. The result of an
    expert for all tokens is weighed and added."""
    hidden, inner = job.shape.hidden_size, experts.width
    # Results of a product and its adapter's.
    adapted = hidden * bool(experts.down_ranks) + 2 * inner * bool(experts.gate_up_ranks)
    summed = 2 * adapted if job.lora else 0
    numbers = 7 * hidden + 5 * inner + summed
    moved = BF16 * experts.num_chosen * numbers + 10 * experts.num_experts
    if experts.shared_width:
        moved += BF16 * (5 * experts.shared_width + 5 * hidden)
    return moved


def _delta_net_bytes(shape: RecurrentShape) -> float:
    """Bytes for each token that a gated delta net's forward moves outside of its products and its
    kernel, with Liger Kernel or without: the convolution, copies of its output for the kernel,
    whose queries and keys get the length 1, and the gated norm, in torch's operators."""
    keys, values = 2 * shape.num_groups * shape.key_dim, shape.num_heads * shape.value_dim
    return BF16 * (4 * (keys + values) + 2 * keys) + GATED_NORM_BYTES * values


def _fsdp_seconds(job: Job, compute_s: float) -> float:
    """Seconds of FSDP that nothing hides: copies, the last reduction, and messages beyond the time
    of matrix products."""
    ranks, machine, shape = job.cluster.num_gpus, job.cluster.hardware, job.shape
    if not job.fsdp:
        return 0.0
    one_node = ranks <= machine.gpus_per_node
    link = machine.intra_node if one_node else machine.inter_node
    away = (ranks - 1) / ranks
    gathered = 2 * BF16 * shape.num_weights
    reduced = FP32 * job.trained_weights
    travels_s = (gathered + reduced) * away / link.bandwidth
    trains_embeddings = not job.lora or "embeddings" in job.also_train
    last = FP32 * shape.head_weights * away / link.bandwidth if trains_embeddings else 0
    copies_s = shape.num_weights * FSDP_BYTES / machine.copy_bandwidth
    return copies_s + last + max(0.0, travels_s - compute_s)


def _offload_seconds(job: Job, candidate: Candidate, tokens: float, attention: Attention) -> float:
    """Seconds of host copies that layers don't hide."""
    machine, exposed, forward_s = job.cluster.hardware, 0.0, 0.0
    on_host = Counter(
        kind for kind, policy in _with_policies(job, candidate) if POLICIES[policy].on_host
    )
    for kind, number in job.shape.kinds.items():
        layer_s = _forward_seconds(job, candidate, kind, tokens, attention)
        forward_s += number * layer_s
        num_bytes = tokens * checkpoint_bytes(candidate, layer_bytes(job, candidate, kind))
        out_s = num_bytes / machine.host_out_bandwidth
        in_s = num_bytes / machine.host_in_bandwidth
        exposed += on_host[kind] * (max(0.0, out_s - layer_s) + max(0.0, in_s - 2 * layer_s))
    moved_s = 0.0
    if candidate.offload_states:  # weights come for forward and backward, gradients go
        weights, gradients, _ = states(job)
        each_way = 2 * weights / machine.host_in_bandwidth + gradients / machine.host_out_bandwidth
        moved_s = max(0.0, each_way - 3 * forward_s)
    return exposed + moved_s


def _forward_seconds(
    job: Job, candidate: Candidate, kind: LayerShape, tokens: float, attention: Attention
) -> float:
    """Seconds of a layer's forward: its mixer and its matrix products."""
    if kind.recurrence is None:
        mixer_s = attention.forward.makespan_s
    else:
        mixer_s = candidate.recurrence.forward_s if candidate.recurrence is not None else 0.0
    dense_s = 2 * tokens * kind.dense_weights / job.cluster.hardware.matmul_flops
    return mixer_s + dense_s + _experts_forward_s(job, kind, tokens)


def _host_seconds(
    job: Job, candidate: Candidate, tokens: float, attention: Attention, layers_s: float
) -> float:
    """Seconds of one forward and its backward in which GPUs wait for hosts, where the layers take
    GPUs `layers_s` in both."""
    shape, bandwidth = job.shape, ELEMENTWISE_SHARE * job.cluster.hardware.copy_bandwidth
    forward_s = sum(
        number
        * (
            _forward_seconds(job, candidate, kind, tokens, attention)
            + tokens * _elementwise_bytes(job, kind) / bandwidth
        )
        for kind, number in shape.kinds.items()
    )
    runs_s = (shape.num_layers + 1.5 * len(_recomputed(job, candidate))) * HOST_LAYER_S
    waits_s = 0.0
    for of_fsdp, found, on_gpus_s in (
        (HOST_FSDP_S[0], attention.forward, forward_s),
        (HOST_FSDP_S[1], attention.backward, layers_s - forward_s),
    ):
        sharding_s = shape.num_layers * of_fsdp if job.fsdp else 0.0
        mixers_s = shape.num_attending * (HOST_IN_STEP * found.host_s + found.host_ulysses_s)
        waits_s += max(0.0, runs_s + sharding_s + mixers_s - on_gpus_s)
    return waits_s


def _optimizer_seconds(job: Job, candidate: Candidate) -> float:
    """Seconds of AdamW's step, and of clipping where that is on the host."""
    mine = job.trained_weights / job.num_shards
    if candidate.offload_states:
        clipping_s = mine * FP32 / HOST_CLIP_BYTES_PER_S if job.clips else 0.0
        return mine * HOST_ADAMW_BYTES / HOST_ADAMW_BYTES_PER_S + clipping_s
    return mine * ADAMW_BYTES / job.cluster.hardware.copy_bandwidth
