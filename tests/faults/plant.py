"""Faults that are planted into a job: what happens, at which place of a run, in which rank.

They are planted in the launcher's process, from which `longctx train` forks the job's processes, by
wrapping what every recipe calls of torch, accelerate and transformers.
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer
from transformers.models.llama.modeling_llama import LlamaMLP

from longctx_patch.checkpoints.background import BesideTraining

Kind = Literal[
    "kill",
    "stop",
    "terminate",
    "exception",
    "nan",
    "diverge",
    "full disk",
    "truncate",
    "flip",
    "delete",
]
Place = Literal["start", "forward", "backward", "optimizer", "save", "writing", "final"]
"""In "writing" a thread writes a checkpoint while the next step is computed."""

STEPS = 8
"""A signal in the bad one, or in the one after it, stops the run before the last."""
SAVE_EVERY = 2
BAD_STEP = 4
"""Disturbed in forward, backward and the optimizer; the second checkpoint is written after it."""
HELD_UP_S = 60.0
"""How long a thread waits for the next step before it writes."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
DAMAGES: tuple[Kind, ...] = ("truncate", "flip", "delete")
ALLOWED_BYTES = 2**15
"""How long a file may be on a disk that is full. A rank's error for its launcher is no longer."""
STRUCK_FILE = "struck.txt"
"""In the run folder: when the fault struck, by the machine's monotonic clock."""


class PlantedError(Exception):
    """What a rank raises."""


@dataclass(frozen=True)
class Fault:
    """One bad thing that happens to one rank."""

    kind: Kind
    place: Place
    rank: int

    @property
    def name(self) -> str:
        return f"{self.kind} in {self.place} of rank {self.rank}"


def faults(num_ranks: int) -> list[Fault]:
    """Every kind at every place where it means something, in every rank.

    Numbers are spoiled where numbers are made, weights diverge from those of rank 0, disks are full
    where a rank writes large files (the final model is rank 0's), and files are damaged after they
    were written.
    """
    where: dict[Kind, tuple[Place, ...]] = {kind: get_args(Place) for kind in get_args(Kind)}
    where |= {
        "nan": ("start", "forward", "backward", "optimizer"),
        "diverge": ("optimizer",),
        "full disk": ("save", "writing", "final"),
    }
    where |= dict.fromkeys(DAMAGES, ("save",))
    return [
        Fault(kind, place, rank)
        for kind, places in where.items()
        for place in places
        for rank in range(1 if (kind, place) == ("full disk", "final") else num_ranks)
        if not (kind == "diverge" and rank == 0)
    ]


@dataclass
class _Planted:
    """Counts what a rank does, and strikes once when it is where the fault is to happen."""

    fault: Fault
    steps: int = 0
    saves: int = 0
    written: int = 0
    next_step: threading.Event = field(default_factory=threading.Event)
    """Set when the step after the bad one is computed."""
    struck: bool = field(default=False)

    def strike_at(self, place: Place) -> bool:
        """Whether this is the moment; kinds that need no tensor happen here."""
        if self.struck or place != self.fault.place or not self._is_time(place):
            return False
        if int(os.environ["RANK"]) != self.fault.rank:
            return False
        kind = self.fault.kind
        if not Path(STRUCK_FILE).exists():
            Path(STRUCK_FILE).write_text(str(time.monotonic()))
        # A NaN has a cause, and so is there again if the step is run again.
        self.struck = kind != "nan"
        if kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[kind])
        elif kind == "exception":
            raise PlantedError("planted")
        elif kind == "full disk":  # Python ignores SIGXFSZ
            resource.setrlimit(resource.RLIMIT_FSIZE, (ALLOWED_BYTES, resource.RLIM_INFINITY))
        return kind in ("nan", "diverge")

    def _is_time(self, place: Place) -> bool:
        # A bad step is run again after the optimizer, which left it out, was called for it.
        again = self.fault.kind == "nan" and self.steps == BAD_STEP
        return {
            "start": True,
            "forward": self.steps == BAD_STEP - 1 or again,
            "backward": self.steps == BAD_STEP - 1 or again,
            "optimizer": self.steps == BAD_STEP - 1,
            "save": self.saves == BAD_STEP // SAVE_EVERY,
            "writing": self.written == BAD_STEP // SAVE_EVERY,
            "final": self.steps == STEPS,
        }[place]


def plant(fault: Fault) -> None:
    """Wrap what this process and those forked from it call."""
    it = _Planted(fault)
    _wrap_prepare(it)
    _before(Accelerator, "unwrap_model", lambda *_: it.strike_at("final"))
    _before(Trainer, "_save_rng_state", lambda *_: _save(it))
    _wrap_writing(it)
    _wrap_mlp(it)
    register_optimizer_step_pre_hook(lambda optimizer, *_: _step(it, optimizer))


def _before(owner: type, name: str, first: Callable[..., Any]) -> None:
    stock = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first(*args)
        return stock(*args, **kwargs)

    setattr(owner, name, wrapped)


def _wrap_prepare(it: _Planted) -> None:
    stock = Accelerator.prepare

    def prepare(accelerator: Accelerator, model: Any, *rest: Any, **options: Any) -> Any:
        prepared = stock(accelerator, model, *rest, **options)
        # Trainers prepare their loader of data first.
        if isinstance(model, torch.nn.Module) and it.strike_at("start"):
            spoil(next(model.parameters()))  # not before: all ranks take the weights of rank 0
        return prepared

    Accelerator.prepare = prepare


def _save(it: _Planted) -> None:
    it.saves += 1
    it.strike_at("save")


def _step(it: _Planted, optimizer: torch.optim.Optimizer) -> None:
    if it.strike_at("optimizer"):
        weight = optimizer.param_groups[0]["params"][0]
        if it.fault.kind == "nan":
            spoil(weight.grad)
        else:
            weight.data.view(-1)[0] += 1e-3
    it.steps += 1


def _wrap_writing(it: _Planted) -> None:
    stock = BesideTraining.start

    def start(self: BesideTraining, name: str, write: Callable[[Any], object]) -> None:
        def writes(group: Any) -> None:
            it.written += 1
            if it.fault.place == "writing" and it.written == BAD_STEP // SAVE_EVERY:
                it.next_step.wait(HELD_UP_S)
                it.strike_at("writing")
            write(group)

        stock(self, name, writes)

    BesideTraining.start = start  # type: ignore[method-assign]


def _wrap_mlp(it: _Planted) -> None:
    stock = LlamaMLP.forward

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        out = stock(self, x)
        if it.steps == BAD_STEP:
            it.next_step.set()
        if it.strike_at("forward"):
            out = out * torch.nan
        if out.requires_grad:
            out.register_hook(lambda grad: grad * torch.nan if it.strike_at("backward") else grad)
        return out

    LlamaMLP.forward = forward


def spoil(tensor: Any) -> None:
    """Make one number of a tensor, or of this rank's shard of it, no number."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    with torch.no_grad():
        local.view(-1)[0] = torch.nan


def damage(file: Path, kind: Kind) -> None:
    """Truncate or delete a file, or flip a bit in its middle."""
    if kind == "delete":
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    if kind == "truncate":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 64
    file.write_bytes(content)
