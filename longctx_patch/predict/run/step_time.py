"""Seconds of a training step, by part, predicted.

Attention comes from the simulation of its plan (`longctx_patch.predict.attention.costs`). Matrix
products run at the rate that they reach inside of a step, everything between them at the bandwidth
of memory. FSDP's messages hide behind layers; its copies and its last reduction don't.
"""

from dataclasses import dataclass

from longctx_patch.memory.policies import POLICIES, count_on_host, count_recomputed
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.predict.attention.costs import Prediction, predict
from longctx_patch.predict.run.candidate import Candidate, Job
from longctx_patch.predict.run.components import BF16, FP32, checkpoint_bytes, layer_bytes, states
from longctx_patch.predict.run.parts import Parts

ELEMENTWISE_SHARE = 0.77
"""Share of the bandwidth of copies that norms, rotary embeddings, SwiGLU and residuals reach: 49 ms
of a step of 131,072 tokens and 8 layers of Llama-3.1-8B on 4 H200."""
UNFUSED = 3.0
"""The factor by which more bytes move where each of these is several of torch's operations."""
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
IDLE_S = 7e-3
"""Seconds of a step without work: the optimizer's start, the loss's way to the host."""


@dataclass(frozen=True, kw_only=True)
class StepTime(Parts):
    """Seconds of a step; each instant counts in one part only."""

    attention: float
    linear: float
    elementwise: float
    loss: float
    fsdp: float
    offload: float
    """Copies to and from the host that layers don't hide."""
    optimizer: float
    idle: float = IDLE_S


@dataclass(frozen=True)
class Attention:
    """What the cost model says of one layer's attention."""

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
    shape, machine, policies = job.shape, job.cluster.hardware, candidate.policies
    again = count_recomputed(policies)
    forward_s, backward_s = attention.forward.makespan_s, attention.backward.makespan_s
    linear, head = shape.num_layers * shape.layer_linear_weights, shape.head_weights
    # FLOPs for each weight: two forward, two for the input's gradient, two more if it is trained.
    each = 4 if job.lora else 6
    recomputed = again * (shape.layer_linear_weights - shape.down_weights)
    if candidate.mlp_tiles > 1:  # backward runs each tile's MLP again, in whole layers too
        recomputed += (shape.num_layers - again) * (shape.num_mlp_products - 1) * shape.down_weights
        if job.lora:  # the last product too, since an adapter follows it
            recomputed += shape.num_layers * shape.down_weights
    products = tokens * (each * linear + 2 * recomputed)
    per_token = _elementwise_bytes(job)
    moved = tokens * per_token * (3 * shape.num_layers + again)
    bandwidth = machine.copy_bandwidth
    layer_s = forward_s + 2 * tokens * shape.layer_linear_weights / machine.matmul_flops
    keeps = sum(POLICIES[policy].keeps_attention for policy in policies)
    runs_again = again - keeps + keeps * (1 - candidate.attention_kept) ** 2
    attention_s = shape.num_layers * (forward_s + backward_s) + runs_again * forward_s
    return StepTime(
        attention=forwards * attention_s,
        linear=forwards * products / machine.matmul_flops,
        elementwise=forwards * moved / (ELEMENTWISE_SHARE * bandwidth),
        loss=forwards
        * tokens
        * (each * head / machine.matmul_flops + LOSS_BYTES * shape.vocab_size / bandwidth),
        fsdp=forwards * _fsdp_seconds(job, products / machine.matmul_flops),
        offload=forwards * _offload_seconds(job, candidate, tokens, layer_s),
        optimizer=_optimizer_seconds(job, candidate),
    )


def _elementwise_bytes(job: Job) -> float:
    """Bytes for each token that a layer's forward moves beside matrix products and attention: two
    norms, two residuals, rotary embeddings, SwiGLU, heads."""
    shape = job.shape
    kv = shape.num_kv_heads * shape.head_dim
    moved = BF16 * (14 * shape.hidden_size + 2 * kv + 3 * shape.intermediate_size)
    # An adapter reads a layer's input once more, and adds to its output; without FSDP in float32.
    adapters = (2 if job.fsdp else 4) * BF16 * shape.linear_sides if job.lora else 0
    return moved * (1 if job.fused_layers else UNFUSED) + adapters


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
    last = 0 if job.lora else FP32 * shape.head_weights * away / link.bandwidth
    copies_s = shape.num_weights * FSDP_BYTES / machine.copy_bandwidth
    return copies_s + last + max(0.0, travels_s - compute_s)


def _offload_seconds(job: Job, candidate: Candidate, tokens: float, layer_s: float) -> float:
    """Seconds of host copies that layers don't hide; `layer_s` is the time of a layer's forward."""
    machine, offloaded = job.cluster.hardware, count_on_host(candidate.policies)
    num_bytes = tokens * checkpoint_bytes(candidate, layer_bytes(job, candidate))
    out_s, in_s = num_bytes / machine.host_out_bandwidth, num_bytes / machine.host_in_bandwidth
    exposed = max(0.0, out_s - layer_s) + max(0.0, in_s - 2 * layer_s)
    moved_s = 0.0
    if candidate.offload_states:  # weights come for forward and backward, gradients go
        weights, gradients, _ = states(job)
        each_way = 2 * weights / machine.host_in_bandwidth + gradients / machine.host_out_bandwidth
        moved_s = max(0.0, each_way - 3 * job.shape.num_layers * layer_s)
    return offloaded * exposed + moved_s


def _optimizer_seconds(job: Job, candidate: Candidate) -> float:
    """Seconds of AdamW's step, and of clipping where that is on the host."""
    mine = job.trained_weights / job.num_shards
    if candidate.offload_states:
        clipping_s = mine * FP32 / HOST_CLIP_BYTES_PER_S if job.clips else 0.0
        return mine * HOST_ADAMW_BYTES / HOST_ADAMW_BYTES_PER_S + clipping_s
    return mine * ADAMW_BYTES / job.cluster.hardware.copy_bandwidth
