"""Patched models to train: with policies forced on layers, with a meter, or with MLPs in tiles."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from longctx_patch import LongContextConfig, PatchHandle, SequenceShardCollator, patch
from longctx_patch.engine.call import CallShape
from longctx_patch.engine.planned_traffic import predicted_traffic
from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.memory.run_layer import run_layer
from longctx_patch.plans.traffic import Traffic
from tests.engine.exact import causal_call
from tests.hf.tiny import gradients, mean_over_ranks, token_rows
from tests.memory.live_bytes import LiveBytes
from tests.reference import relative_error

Gradients = dict[str, Tensor]
"""The loss of a step, and the gradient of each parameter by its name."""


FORWARDS: dict[LayerPolicy, int] = {"none": 1, "full": 2, "attention": 1, "offload": 1}
"""How often attention's forward runs in a step, written down here and not read from records."""
REPLAYS = ("attention", "offload")
"""Policies whose backward gets attention's results from forward."""


class Forced:
    """Stands in for `AutoPolicy`, and gives each layer the policy that it was told."""

    use = None

    def __init__(self, policies: Sequence[LayerPolicy]) -> None:
        self.policies = tuple(policies)
        self.host = HostCopies(torch.device("cpu"))

    def propose(self, num_tokens: int) -> int:
        return 0

    def begin(self, num_tokens: int, whole: int) -> None:
        return None

    def run(self, layer: int, forward: Any, *args: Any) -> Any:
        return run_layer(self.policies[layer], forward, *args, host=self.host)


class Trained:
    """A patched model and its batches, on the device of its weights."""

    def __init__(
        self,
        model: Any,
        *,
        length: int = 48,
        rows: int = 2,
        meter: LiveBytes | None = None,
        forced: Sequence[LayerPolicy] = (),
        **config: Any,
    ) -> None:
        """With a `meter` or `forced` policies, `checkpoint` is `auto` unless `config` names one."""
        self.model, self.length, self.rows = model, length, rows
        policy: dict[str, Any] = {"checkpoint": "auto"} if forced or meter else {}
        self.handle: PatchHandle = patch(model, LongContextConfig(**policy | config))
        if meter:
            self.handle._checkpoints.find_meter = lambda _: meter
        if forced:
            self.force(forced)
        self.device = next(model.parameters()).device
        self.collate = SequenceShardCollator(
            self.handle.config, group_rank=self.handle.group_rank, pad_token_id=0
        )

    def force(self, policies: Sequence[LayerPolicy]) -> None:
        """Give the layers these policies from the next pass on."""
        self.handle._checkpoints._auto = Forced(policies)  # type: ignore[assignment]

    def shard(self) -> None:
        """Wrap each layer and the model by FSDP2, over all ranks."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.handle.model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def loss(self, length: int | None = None, *, seed: int = 0) -> Tensor:
        batch = self.collate(token_rows(length or self.length, self.rows, seed))
        on_device = {name: value.to(self.device) for name, value in batch.items()}
        return self.model(**on_device, use_cache=False).loss

    def step(self, length: int | None = None, *, seed: int = 0) -> Gradients:
        """Loss and gradients of one pass; the model's gradients are cleared afterwards."""
        loss = self.loss(length, seed=seed)
        loss.backward()
        grads = gradients(self.model)
        self.model.zero_grad()
        return {"loss": loss.detach(), **grads}

    def peak(self, meter: LiveBytes, length: int | None = None) -> int:
        """Peak bytes of a pass beyond those allocated before it."""
        rest = meter.allocated()
        meter.reset_peak()
        self.loss(length).backward()
        self.model.zero_grad()
        return meter.peak() - rest


def counted_step(it: Trained) -> Gradients:
    """A step of a tiny model; assert that its traffic is that of its layers' policies."""
    it.handle.counters.reset()
    found = it.step()
    shape = CallShape(2, 4, 2, 16, torch.float32, "cpu")
    layer = predicted_traffic(causal_call(it.handle.group, it.length, 1.0, shape))
    wanted = Traffic()
    for policy in it.handle.checkpointing.policies:
        backward = layer.backward_after_replay if policy in REPLAYS else layer.backward
        wanted = sum([layer.forward] * FORWARDS[policy] + [backward], wanted)
    assert Traffic(it.handle.counters.messages, it.handle.counters.bytes) == wanted
    return found


class Flops(TorchDispatchMode):
    """Counts the FLOPs of all matrix products while it is entered."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def tiled(model: Any, num_tiles: int | None, **config: Any) -> Trained:
    """A patched model whose MLPs are in tiles of rows with a prime number of tokens."""
    return Trained(model, length=31, mlp_tiles=num_tiles, **config)


def adapter(**options: Any) -> LoraConfig:
    targets = ["q_proj", "gate_proj", "down_proj"]
    return LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)


def averaged(grad: Tensor) -> Tensor:
    """Mean over ranks; FSDP2 has averaged its gradients already."""
    return grad.full_tensor() if isinstance(grad, DTensor) else mean_over_ranks(grad)


def assert_equal(found: Gradients, wanted: Gradients) -> None:
    """Assert equality to the bit."""
    assert found.keys() == wanted.keys()
    assert len(found) > 1
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_near(found: Gradients, wanted: Gradients, bound: float = 1e-6) -> None:
    """Assert equality up to rounding, in the same dtypes."""
    assert found.keys() == wanted.keys()
    assert len(found) > 1
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert relative_error(found[name], tensor) < bound, name
