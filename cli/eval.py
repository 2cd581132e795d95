"""`longctx eval`: whether a model uses its context, at any length, sharded as training is."""

# ruff: noqa: RUF009  # option() returns a dataclasses.field, which ruff cannot see
import math
import os
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, count
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
import yaml

from longctx_patch.cli.arguments import RopeOptions, Tokens, asked_degrees, flag, option, options_of
from longctx_patch.cli.train import hides_gpus, import_shared, limit_threads
from longctx_patch.cli.train import start as start_processes
from longctx_patch.config import LongContextConfig
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.facts import ModelFacts
from longctx_patch.recipes.run_record import outputs_of, require_new
from longctx_patch.recipes.yaml_file import read_yaml
from longctx_patch.rules.number_rules import parse_tokens
from longctx_patch.rules.text_table import size_text

if TYPE_CHECKING:
    from longctx_patch.recipes.evaluate import EvalSettings
    from longctx_patch.recipes.evaluated import Evaluated

DEPTHS = (5.0, 25.0, 50.0, 75.0, 95.0)
SHORTEST = 4096
"""The first of the default lengths, where the context is eight times as long or more."""
LEAST = 512
"""A shorter default length has no room for most tasks."""
ROOM = 0.6
"""Share of a GPU's memory that weights may take: rows need the rest."""


class Several(click.ParamType[tuple[Any, ...]]):
    """Values between commas: 4K,8K."""

    def __init__(self, each: Callable[[str], Any], name: str) -> None:
        self._each, self.name = each, name

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._each(part.strip()) for part in str(value).split(",") if part.strip())
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def depth(text: str) -> float:
    """A depth in percent, from 0 to 100."""
    found = float(text.removesuffix("%"))
    if not 0 <= found <= 100:
        raise ValueError("depths are percent of the row, from 0 (its first token) to 100.")
    return found


@dataclass(frozen=True, kw_only=True)
class EvalOptions(RopeOptions):
    """The options of `longctx eval`, as click reads them; None for options not given."""

    beside: Sequence[str] = option(
        "Another model, run or adapter to evaluate too [a run's base].", default=()
    )
    alone: bool = flag("Without the base of a run.")
    lengths: tuple[int, ...] | None = option(
        "4K,16K,64K [powers of two up to the context].", type=Several(parse_tokens, "tokens")
    )
    tasks: tuple[str, ...] = option(
        "passkey,niah_single_1,vt and so on; ruler is all 13 of RULER [passkey].",
        type=Several(str, "names"),
        default=("passkey",),
    )
    depths: tuple[float, ...] = option(
        "Where needles lie, in percent; '': anywhere, as in RULER [5,25,50,75,95].",
        type=Several(depth, "percent"),
        default=DEPTHS,
    )
    samples: int = option("Of each length and depth [6].", default=6)
    text: Sequence[str] = option(
        "Held-out texts, for loss by position and as haystack.", default=()
    )
    haystack: Sequence[str] = option("Texts that hide the needles [--text].", default=())
    text_field: str = option("Field of a record that is its text [text].", default="text")
    essays: str = option("RULER's PaulGrahamEssays.json [--text].", default="")
    squad: str = option("SQuAD's dev file, for qa_1.", default="")
    hotpotqa: str = option("HotpotQA's dev file, for qa_2.", default="")
    english_words: str = option("RULER's english_words.json, for long cwe.", default="")
    questions: str = option("Your own: JSONL of context, question, answers.", default="")
    longppl: bool = flag("Perplexity of the tokens that need the context.")
    seed: int = option(
        "Of the tasks [42, as RULER].", type=click.IntRange(0, 2**32 - 1), default=42
    )
    context: int | None = option("Tokens that a plain model shall reach [its own].", type=Tokens())
    out: Path | None = option("New folder [RUN/eval, or ./eval-NAME].")
    tokenizer: str = option("Name or folder if not the models' own; 'bytes'.", default="")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        "Of the weights [GPUs: 16 bits, as in the config; CPU: float32]."
    )
    num_processes: int | None = option("[All GPUs; --cpu: as the run, or 1].")
    ulysses: int | None = option("Ulysses degree [the run's, or by heads].")
    ring: int | None = option("Ring degree [the rest].")
    cpu: bool | None = option(
        "Processes on the CPU in place of GPUs [as the run].", "--cpu/--no-cpu"
    )


@click.command("eval", short_help="Show whether a model uses its context.")
@click.argument("target", metavar="RUN_OR_MODEL")
@options_of(EvalOptions)
@click.option("--dry-run", is_flag=True, help="Check all, write asked.json, and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print scores.json on stdout.")
def eval_command(target: str, as_json: bool, dry_run: bool, **options: Any) -> None:
    """Evaluate RUN_OR_MODEL on long contexts: a run folder of `longctx patch` (its newest weights,
    beside its base), an output, an adapter's folder, a model's folder or hub name.

    Passkey and RULER's tasks by length and depth, loss by position on --text, LongPPL, and your own
    --questions. Processes share each row as in training, so that the memory of all of them bounds
    its length. Everything is checked before they start. The folder gets scores.json and scores.png;
    `longctx report RUN` shows them.
    """
    decided = decide(target, EvalOptions(**options), is_dry=dry_run)
    start(decided, waits=dry_run)
    if not dry_run:
        _show(decided.folder, as_json=as_json)


class Decided(NamedTuple):
    """An evaluation, before its processes start."""

    settings: "EvalSettings"
    launch_yaml: str
    folder: Path
    """Where it is written."""


def decide(target: str, options: EvalOptions, *, is_dry: bool) -> Decided:
    """Returns what is evaluated, over which processes. Reads files, and no weights.

    Raises ValueError for what can't be evaluated.
    """
    outputs_of(Path(target).expanduser())  # a run without a model is refused before long imports

    from longctx_patch.plugin import accelerate_yaml
    from longctx_patch.recipes.data.addresses import absolute
    from longctx_patch.recipes.evaluate import FILES, EvalSettings
    from longctx_patch.recipes.evaluated import base_of, find

    if options.cpu is None:
        launch = Path(target).expanduser() / "accelerate.yaml"
        on_cpu = launch.is_file() and hides_gpus(read_yaml(launch))
        options = replace(options, cpu=on_cpu)
    tuned = _as_asked(find(target), options)
    lengths = _lengths(tuned, options)
    tuned = tuned.with_(seq_len=options.context or lengths[-1])
    others = [find(each) for each in options.beside]
    if options.tokenizer:
        others = [each.with_(tokenizer=options.tokenizer) for each in others]
    if not (others or options.alone) and (base := base_of(tuned)) is not None:
        others = [base]
    # They are evaluated beyond their reach as they are, which the result says.
    others = [each.with_(seq_len=lengths[-1], allow_beyond_reach=True) for each in others]
    models = [*others, tuned]
    if len({each.label for each in models}) < len(models):
        models = [m.with_(label=f"{m.label} ({n})") for n, m in enumerate(models, start=1)]
    models = [each.with_(dtype=options.dtype or "auto") for each in models]
    world = _world(models, tuned.degrees, options)
    kept = ("tasks", "depths", "samples", "text_field", "longppl", "seed")
    files: dict[str, Any] = {
        name: str(Path(file).expanduser().resolve())
        for name in ("questions", *FILES)
        if (file := getattr(options, name))
    }
    return Decided(
        EvalSettings(
            models=[
                each.with_(ulysses=world.ulysses, ring=world.ring, checkpoint="none")
                for each in models
            ],
            lengths=lengths,
            text=[absolute(source) for source in options.text],
            haystack=[absolute(source) for source in options.haystack],
            **{name: getattr(options, name) for name in kept},
            **files,
        ),
        accelerate_yaml(
            world.num_processes,
            world.ulysses * world.ring,
            fsdp=world.is_sharded,
            cpu=bool(options.cpu),
            mixed_precision="no",
        ),
        _folder(target, tuned, options.out, is_dry=is_dry),
    )


def _as_asked(found: "Evaluated", options: EvalOptions) -> "Evaluated":
    """The model with the options that change how it is read."""
    from longctx_patch.recipes.context import read_factors

    if found.is_trained and (options.rope or options.context):
        raise ValueError(
            "--rope or --context with a model that was trained: it has the RoPE of its training. "
            "Leave it out, or give the model that it was trained from."
        )
    names = ("rope", "rope_theta", "rope_factor", "allow_beyond_reach", "tokenizer")
    given = {name: value for name in names if (value := getattr(options, name))}
    return found.with_(**given, rope_factors=read_factors(options.rope_factors))


def _lengths(tuned: "Evaluated", options: EvalOptions) -> tuple[int, ...]:
    """The lengths of rows: as asked, or powers of two up to the context.

    Raises ValueError for one beyond the context.
    """
    from longctx_patch.recipes.evaluated import config_of, reach_of

    asked, context = options.lengths, options.context or reach_of(tuned)
    if not asked:
        if context is None:
            raise ValueError("the model reaches any length: give --lengths 4K,16K,64K.")
        powers = (2**n for n in range(context.bit_length()))
        first = max(min(SHORTEST, context // 8), LEAST)
        asked = (*(length for length in powers if length >= first), context)
    longest = max(asked)
    if options.context and longest > options.context:
        raise ValueError(
            f"--context {options.context} and a row of {longest} tokens (--lengths): the "
            "context is at least as long as the longest row."
        )
    config_of(tuned.with_(seq_len=options.context or longest))  # refuses what is beyond it
    return tuple(sorted({*asked}))


class World(NamedTuple):
    """The processes, and how they share rows and weights."""

    num_processes: int
    ulysses: int
    ring: int
    is_sharded: bool
    """Whether each process holds a part of the weights only (FSDP2)."""


def _world(
    models: Sequence["Evaluated"], run: tuple[int, int] | None, options: EvalOptions
) -> World:
    """As asked, else all GPUs, with the degrees of the run where it had as many.

    Raises ValueError for more GPUs than there are, and for weights that don't fit into them.
    """
    import torch

    from longctx_patch.recipes.evaluated import config_of

    cpu, there = bool(options.cpu), torch.cuda.device_count()
    number = options.num_processes or (math.prod(run or (1,)) if cpu else there)
    if not cpu and not there:
        raise ValueError(
            "torch finds no GPU here (`longctx doctor` says what is missing). To evaluate on CPU "
            "processes give --cpu."
        )
    if not cpu and number > there:
        raise ValueError(
            f"{number} GPUs to evaluate on, and torch finds {there} here: `longctx "
            "doctor` says what is missing. Give fewer --num-processes, or --cpu."
        )
    configs = [config_of(each) for each in models]
    ulysses, ring = _degrees(configs, number, run, options)
    degrees = LongContextConfig(ulysses_degree=ulysses, ring_degree=ring)
    for model, config in zip(models, configs, strict=True):
        try:
            check_model_config(config, degrees)
        except ValueError as error:
            beside = "" if model is models[-1] else " (--alone leaves it out)"
            raise ValueError(f"{model.label}{beside}: {error}") from error
    sharded = [_is_sharded(*each, number, cpu=cpu) for each in zip(models, configs, strict=True)]
    return World(number, ulysses, ring, any(sharded))


def _degrees(
    configs: Sequence[Any], number: int, run: tuple[int, int] | None, options: EvalOptions
) -> tuple[int, int]:
    """As asked, as the run had them, or Ulysses as far as it divides the heads of all models."""
    from longctx_patch.planner.degrees import most_ulysses

    if options.ulysses or options.ring:
        _, way = asked_degrees(num_ranks=number, ulysses=options.ulysses, ring=options.ring)
        assert way is not None
        return way.ulysses, way.ring
    if run and number % math.prod(run) == 0:
        return run
    heads = math.gcd(*(ModelFacts.of(config).num_kv_heads for config in configs))
    way = most_ulysses(number, num_kv_heads=heads, gpus_per_node=number)
    return way.ulysses, way.ring


def _is_sharded(model: "Evaluated", config: Any, number: int, *, cpu: bool) -> bool:
    """Says whether the weights don't fit whole. Raises ValueError where they don't fit at all, by
    an estimate that leaves some memory to the rows, whose need is not predicted."""
    from longctx_patch.recipes.evaluated import num_bytes

    memory, taken = memory_of_each(number, cpu=cpu), num_bytes(model, config, on_cpu=cpu)
    if taken <= ROOM * memory:
        return False
    what = (
        f"{model.label} has {size_text(taken)} of weights, and each process of {number} has "
        f"{size_text(memory)} of memory"
    )
    if cpu or taken > ROOM * memory * number:
        raise ValueError(f"{what}: they don't fit. Use more GPUs, or ones with more memory.")
    if model.adapter:
        merge = shlex.join(["longctx", "merge", model.adapter])
        raise ValueError(f"{what}: the base of an adapter is not sharded here. First `{merge}`.")
    return True


def memory_of_each(number: int, *, cpu: bool) -> float:
    """Bytes that a process may have: of the smallest GPU, or its share of this machine's. Endless
    where the driver doesn't say. Sets up no GPU, since this process is to be forked."""
    import psutil

    from longctx_patch.cli.diagnosis.gpus import nvidia_smi

    if cpu:
        return float(psutil.virtual_memory().available / number)
    said = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits") or ""
    return min((float(size) * 2**20 for size in said.split() if size.isdigit()), default=math.inf)


def _folder(target: str, tuned: "Evaluated", asked: Path | None, *, is_dry: bool) -> Path:
    """--out; else RUN/eval or ./eval-NAME, with a number behind it where there is one already. A
    dry run's has a name of its own, and is written anew until it has scores."""
    from longctx_patch.recipes.evaluate import SCORES_FILE

    if asked is not None:
        require_new(folder := asked.expanduser().resolve())
        return folder
    first = Path(target).expanduser() / "eval" if tuned.is_run else Path(f"eval-{tuned.label}")
    first, sign = (first.with_name(f"{first.name}-dry"), SCORES_FILE) if is_dry else (first, "")
    others = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(p for p in chain([first], others) if not (p / sign).exists()).resolve()


def start(decided: Decided, *, waits: bool) -> None:
    """Check what is asked against the data, write it, and evaluate in processes of this machine;
    `waits`: only say how they are started.

    Raises ValueError for what the processes would refuse; nothing is written then.
    """
    import torch

    from longctx_patch.recipes.evaluate import refusal

    launch, folder = yaml.safe_load(decided.launch_yaml), decided.folder
    limit_threads(launch)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # torch is here already, and the processes fork from it
    forks = import_shared("evaluate")
    # Not in this process, which is to be forked without the threads that readers of data start.
    with ProcessPoolExecutor(1, get_context("fork" if forks else "spawn")) as pool:
        if problem := pool.submit(refusal, decided.settings).result():
            raise ValueError(problem)
    decided.settings.write(folder)
    (file := folder / "accelerate.yaml").write_text(decided.launch_yaml, encoding="utf-8")
    if waits:
        words = ["accelerate", "launch", "--config_file", str(file)]
        words += ["-m", "longctx_patch.recipes.evaluate", str(folder)]
        return click.echo(f"Written to {folder}. Start it:\n\n  {shlex.join(words)}")
    start_processes(launch, "evaluate", [str(folder)], forks=forks)


def _show(folder: Path, *, as_json: bool) -> None:
    """Print the table, or what scores.json holds, and draw the picture where matplotlib is there.
    Where they are written is said on stderr."""
    from longctx_patch.cli.eval_result import draw, read_result, table
    from longctx_patch.recipes.evaluate import SCORES_FILE

    found = read_result(file := folder / SCORES_FILE)
    click.echo(file.read_text(encoding="utf-8") if as_json else table(found), nl=not as_json)
    missing = " (no picture: pip install longctx-patch[draw])"
    if find_spec("matplotlib") is not None:
        missing = ""
        draw(found, folder / "scores.png")
    click.echo(f"Written to {folder}{missing}", err=True)
