"""What it costs that a run survives bad days: its guards in each step and start, and its saving.

    torchrun --nproc_per_node 1 benchmarks/bad_days.py guards --layers 2 --tokens 2048
    torchrun --nproc_per_node 2 benchmarks/bad_days.py background --layers 4 --tokens 65536

Runs the text recipe on random weights. `guards`: they are taken out of every other block of steps,
so that both kinds see the same machine; a GPU is faster in the first two, which don't count. `with`
and `without` are medians of a step, `host` is what the host itself spends in the guards. The
start's checks are timed in it as well. Replicas are compared where there are several ranks alone.
`background` and `waiting` save checkpoints, while training goes on and while it waits: `lost` is
the time above that of quiet steps, as a share of it, and `lost_s` the same in seconds, of each
checkpoint: the first makes the memory that later ones are copied into. Quiet are the steps after
the first checkpoint in which nothing is written: saves have to be so far apart that there are some.
`save_s` and `write_s` have all saves, the last one with its wait. One line of JSON, printed by rank
0.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from model_shapes import model_config

from longctx_patch.checkpoints.keeper import Keeper
from longctx_patch.health.finite import FiniteSteps, StepNumbers, gathered
from longctx_patch.health.replicas import ReplicaCheck
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.memory.random_state import RandomState
from longctx_patch.recipes import finetune

BLOCK = 10
"""Steps with the guards, then as many without."""
WARM_UP = 2 * BLOCK
"""Steps in which a GPU is cool, and so faster than later."""
SETTLED = 3
"""First steps, which make buffers and the optimizer's states."""
WAITS = "settle, with its wait"
CHECKS = ("require_agreement", "check_weights", "ReplicaCheck")


@dataclass
class Clock:
    """When steps ended, and how long calls took."""

    starts: list[float] = field(default_factory=list)
    """Of the optimizer's part of each step."""
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """When calls began and ended."""

    @property
    def seconds(self) -> dict[str, list[float]]:
        return {name: [end - start for start, end in x] for name, x in self.spans.items()}

    @property
    def is_guarded(self) -> bool:
        return len(self.starts) // BLOCK % 2 == 0

    def periods(self) -> list[tuple[int, float]]:
        """The time from one step to the next, with the number of the first."""
        found = enumerate(later - sooner for sooner, later in pairwise(self.starts))
        return [*found][SETTLED:]

    def is_within(self, number: int, names: Collection[str]) -> bool:
        """Whether one of these calls ran between this step and the next."""
        first, last = self.starts[number : number + 2]
        return any(a < last and b > first for name in names for a, b in self.spans[name])

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spans[name].append((began, time.perf_counter()))

        return wrapped


def unguarded_step(
    self: FiniteSteps, loss: torch.Tensor, grad_norm: torch.Tensor, *_: Any, **__: Any
) -> StepNumbers:
    """What a loop does that only reports its numbers."""
    self._optimizer.step()
    by_rank = gathered(torch.stack([loss.detach().double(), grad_norm.detach().double()])).cpu()
    mean, norm = by_rank[:, 0].mean().item(), by_rank[0, 1].item()
    return StepNumbers(loss=mean, grad_norm=norm, problem="")


@contextmanager
def every_other_block(clock: Clock) -> Iterator[None]:
    """Within the context the guards are in every other block of steps."""
    guarded = FiniteSteps.step
    guard, settle = FiniteSteps.guard, FiniteSteps.settle
    nothing = RandomState(torch.device("cpu"), torch.get_rng_state(), None)

    def step(self: FiniteSteps, *args: Any, **kwargs: Any) -> StepNumbers:
        on = clock.is_guarded
        clock.starts.append(time.perf_counter())
        return guarded(self, *args, **kwargs) if on else unguarded_step(self, *args, **kwargs)

    def only_guarded(name: str, call: Callable[..., Any], other: Any = None) -> Callable[..., Any]:
        timed = clock.timed(name, call)
        return lambda *args: timed(*args) if clock.is_guarded else other

    with (
        patch.object(FiniteSteps, "step", step),
        patch.object(FiniteSteps, "guard", clock.timed("guard", guard)),
        patch.object(FiniteSteps, "settle", clock.timed(WAITS, settle)),
        patch.object(RandomState, "now", only_guarded("random", RandomState.now, nothing)),
        patch.object(ReplicaCheck, "after_step", only_guarded("replicas", ReplicaCheck.after_step)),
        patch.object(Watchdog, "done", only_guarded("watchdog", Watchdog.done)),
        patch.object(Keeper, "look", only_guarded("keeper", Keeper.look)),
    ):
        yield


def guards(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of a step with and without them, and of the checks before the first one."""
    clock = Clock()
    checks: dict[str, Any] = {name: clock.timed(name, getattr(finetune, name)) for name in CHECKS}
    with every_other_block(clock), patch.multiple(finetune, **checks):
        run(arguments, folder / "guards")
    with_s, without_s = by_kind(clock)
    times_by_name = clock.seconds
    medians = {name: statistics.median(times) for name, times in times_by_name.items()}
    return {
        "with_s": with_s,
        "without_s": without_s,
        "host_ms": 1e3 * sum(medians[name] for name in medians.keys() - {*CHECKS, WAITS}),
        "host_ms_of_each": {name: 1e3 * seconds for name, seconds in medians.items()},
        "start_s": {name: sum(times_by_name[name]) for name in CHECKS},
    }


def by_kind(clock: Clock) -> tuple[float, float]:
    """Medians of steps with and without guards, once the clocks of a GPU have settled."""
    kinds: dict[bool, list[float]] = {True: [], False: []}
    for number, seconds in clock.periods():
        around = {(number + later) // BLOCK % 2 == 0 for later in (0, 1)}
        if number >= WARM_UP and len(around) == 1:  # not where one kind begins
            kinds[around.pop()].append(seconds)
    if not all(kinds.values()):
        raise SystemExit(
            f"--steps {len(clock.starts)}: both kinds need a block after {WARM_UP} steps of "
            f"warm-up: make {WARM_UP + 2 * BLOCK + SETTLED} or more."
        )
    return statistics.median(kinds[True]), statistics.median(kinds[False])


def saving(arguments: argparse.Namespace, folder: Path, *, in_background: bool) -> dict[str, Any]:
    """What checkpoints take of a run's time."""
    clock = Clock()
    stock, save = FiniteSteps.step, clock.timed("save", Keeper.save)
    write = clock.timed("write", Keeper._write)

    def step(self: FiniteSteps, *args: Any, **kwargs: Any) -> StepNumbers:
        clock.starts.append(time.perf_counter())
        return stock(self, *args, **kwargs)

    output = folder / ("background" if in_background else "waiting")
    flag = "--save-in-background" if in_background else "--no-save-in-background"
    with (
        patch.object(FiniteSteps, "step", step),
        patch.object(Keeper, "save", save),
        patch.object(Keeper, "_write", write),
    ):
        run(arguments, output, flag, "--save-every", str(arguments.save_every))
    return {
        **lost_to_saving(clock, arguments.save_every),
        "save_s": clock.seconds["save"],
        "write_s": clock.seconds["write"],
        "bytes": sum(p.stat().st_size for p in next(output.glob("checkpoints/*")).rglob("*")),
    }


def lost_to_saving(clock: Clock, every: int) -> dict[str, Any]:
    """Time of whole intervals between saves, beside that of as many quiet steps."""
    later = [(number, s) for number, s in clock.periods() if number >= every - 1]
    quiet = [s for number, s in later if not clock.is_within(number, ("save", "write"))]
    num_saves = len(later) // every
    if not quiet or not num_saves:
        raise SystemExit(
            f"--save-every {every}: {len(quiet)} steps after the first checkpoint in which nothing "
            f"is written, and {num_saves} whole intervals. Make more --steps, or save less often."
        )
    quiet_s = statistics.median(quiet)
    intervals = [later[number * every : (number + 1) * every] for number in range(num_saves)]
    lost_s = [sum(s - quiet_s for _, s in interval) for interval in intervals]
    return {
        "quiet_s": quiet_s,
        "num_quiet": len(quiet),
        "lost": sum(lost_s) / (num_saves * every * quiet_s),
        "lost_s": lost_s,
    }


def run(arguments: argparse.Namespace, output: Path, *more: str) -> None:
    """The recipe with these settings."""
    given = {
        "model": arguments.work / "config.json",
        "tokenizer": "bytes",
        "text": arguments.work / "text.txt",
        "seq-len": arguments.tokens,
        "max-steps": arguments.steps,
        "output": output,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    finetune.main([*words, "--full", *more])


def prepare(arguments: argparse.Namespace, work: Path) -> None:
    config = model_config(arguments.model, arguments.layers, arguments.tokens)
    for name, value in {"hidden_size": arguments.hidden, "vocab_size": arguments.vocab}.items():
        if value:
            setattr(config, name, value)
    config.dtype = arguments.dtype
    config.save_pretrained(work)
    lines = (f"{n} times {n + 3} is {n * (n + 3)}.\n" for n in range(arguments.tokens))
    (work / "text.txt").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["guards", "background", "waiting"])
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int, help="another hidden size")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, default=103)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--out", type=Path, help="where runs write, instead of a temporary folder")
    arguments = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    place = Path(tempfile.gettempdir()) / f"bad_days_{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    arguments.work = (arguments.out or place) / f"inputs_{rank}"  # one for each, so none waits
    prepare(arguments, arguments.work)
    folder = arguments.out or place
    if arguments.part == "guards":
        found = guards(arguments, folder)
    else:
        found = saving(arguments, folder, in_background=arguments.part == "background")
    if rank == 0:
        print(
            json.dumps(
                {"part": arguments.part, "ranks": os.environ.get("WORLD_SIZE", "1"), **found}
            )
        )


if __name__ == "__main__":
    main()
