"""Systems that make training steps over long rows, ours and others', timed by `step_job.py`.

A module here has `build(job, model, options)`, which returns a `System`. Importing it must need
nothing but torch, transformers, Accelerate and this project: other packages are imported inside.
Without FSDP (one process, or the CPU) weights keep the dtype they are made in; with it they are
kept in float32 and used in bfloat16, as Accelerate's mixed precision does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from model_shapes import CountedShape
from torch import Tensor, nn
from torch.nn import functional as F

from longctx_patch.planner.model_shape import ModelShape

IGNORE_INDEX = -100
LEARNING_RATE = 1e-7  # so small that the loss stays comparable from step to step
CHECKED_PARTS = (
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.kv_b_proj.weight",
    "linear_attn.in_proj_qkv.weight",
    "linear_attn.out_proj.weight",
)
_WRAPPERS = ("_checkpoint_wrapped_module.", "module.")


class NotCovered(Exception):
    """A system can't run this; the message says why."""


@dataclass(frozen=True)
class Job:
    """The processes that share a row: all of this launch."""

    device: torch.device
    rank: int
    num_ranks: int
    shape: ModelShape | CountedShape

    @property
    def shards_weights(self) -> bool:
        """Whether FSDP2 is used, which Accelerate has on GPUs only."""
        return self.device.type == "cuda" and self.num_ranks > 1

    @property
    def precision(self) -> str:
        return "bf16" if self.shards_weights else "no"


class System(Protocol):
    """A model, its optimizer, and what cuts a row over the ranks. Every method is collective."""

    model: nn.Module
    warm_up_steps: int
    rows_at_once: int
    """How many groups of ranks there are, each of which has the same row."""
    learns_all: bool
    """Whether every weight is trained, so that its gradient can be compared."""

    def load(self, row: Tensor) -> None:
        """Take the row for the next steps: `[1, N]`, whole and the same on every rank."""
        ...

    def loss(self) -> Tensor:
        """This rank's loss, whose mean over ranks is the mean over all tokens."""
        ...

    def backward(self, loss: Tensor) -> None: ...

    def gradient_norm(self, name: str) -> float:
        """The norm of the gradient that one process would have, between `backward` and `update`."""
        ...

    def update(self) -> None:
        """Make the optimizer's step, and clear the gradients."""
        ...

    def details(self) -> dict[str, Any]:
        """Whatever the system has decided by itself, for the report."""
        ...

    def close(self) -> None: ...


class TorchTrained:
    """What systems share whose Accelerator goes backward and whose optimizer is one of torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    warm_up_steps = 2
    rows_at_once = 1
    learns_all = True
    _accelerator: Any
    _row: Tensor

    def load(self, row: Tensor) -> None:
        self._row = row

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def gradient_norm(self, name: str) -> float:
        return gradient_norm(self.model, name)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def details(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._accelerator.end_training()


def next_tokens(row: Tensor) -> Tensor:
    """Labels of a row `[1, N]`, shifted: the last token has none."""
    return F.pad(row[:, 1:], (0, 1), value=IGNORE_INDEX)


def mean_loss(logits: Tensor, labels: Tensor, num_tokens: int, num_ranks: int) -> Tensor:
    """A rank's loss, whose mean over ranks is the mean over the N - 1 tokens with a label."""
    total = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total.float() / (num_tokens - 1) * num_ranks


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes and infixes of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter(model: nn.Module, name: str) -> nn.Parameter:
    return next(p for full, p in model.named_parameters() if plain_name(full) == name)


def gradient_norm(model: nn.Module, name: str) -> float:
    """The norm of a parameter's gradient, whole or sharded by FSDP2. Collective."""
    gradient = parameter(model, name).grad
    if gradient is None:
        return 0.0
    norm = torch.linalg.vector_norm(gradient.float())
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def make_optimizer(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=device.type == "cuda")


def take(options: dict[str, Any], **choices: tuple[Any, ...]) -> dict[str, Any]:
    """Options by name. Each must be one of its choices, of which the first is the default.

    Raises ValueError for others; else something would be timed that was not asked for.
    """
    unknown = sorted(options.keys() - choices.keys())
    if unknown:
        raise ValueError(f"options {', '.join(unknown)}: this system has {', '.join(choices)}.")
    chosen = {name: values[0] for name, values in choices.items()} | options
    for name, value in chosen.items():
        if value not in choices[name]:
            known = ", ".join(str(choice) for choice in choices[name])
            raise ValueError(f"option {name}={value}: this system has {known}.")
    return chosen
