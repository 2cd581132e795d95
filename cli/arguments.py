"""Options of commands as fields of dataclasses, what they take, those that several commands have,
and how an option that is gone is refused."""

# ruff: noqa: RUF009  # option() returns a dataclasses.field, which ruff cannot see
import re
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from longctx_patch.families.rope_facts import SCALINGS, RopeKind
from longctx_patch.planner.degrees import Way
from longctx_patch.planner.job import nearest_multiples
from longctx_patch.rules.names import did_you_mean
from longctx_patch.rules.number_rules import parse_tokens
from longctx_patch.rules.world import require_whole_groups


class Choice(click.Choice[str]):
    """One of several names; any other name is refused, with the nearest of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(error.message + did_you_mean(value, self.choices), param, ctx)


class Tokens(click.ParamType[int]):
    """131072, 128K (times 1,024) or 1M (times 1,048,576)."""

    name = "tokens"

    def __init__(self, least: int = 2) -> None:
        self.least = least

    def convert(self, value: object, param: object, ctx: object) -> int:
        try:
            return parse_tokens(str(value), self.least)
        except ValueError as error:
            self.fail(str(error))


class Branches(click.ParamType[tuple[int, int]]):
    """8x1K: so many branches, of so many tokens each."""

    name = "branches"

    def convert(self, value: object, param: object, ctx: object) -> tuple[int, int]:
        if found := re.fullmatch(r"(\d+)\s*[xX*]\s*(.+)", str(value).strip()):
            try:
                return int(found[1]), parse_tokens(found[2], 1)
            except ValueError as error:
                self.fail(str(error))
        self.fail(f"{value!r}: write a number of branches and the tokens of each, as 8x1K.")


class Gpus(click.ParamType[str]):
    """A number, a kind, or both: `longctx plan` lists the kinds; a kind alone is one GPU."""

    name = "gpus"

    def convert(self, value: object, param: object, ctx: object) -> str:
        kind = r"[A-Za-z]\w*(-\w+)?"
        if re.fullmatch(kind, text := str(value).strip()):
            return f"1x{text}"
        if not re.fullmatch(rf"[1-9]\d*(\s*[xX*]\s*{kind})?", text):
            self.fail(f"{value!r}: write a number of GPUs, 1 or more, or with their kind: 4xH200.")
        return text


def option(text: str, *names: str, default: Any = None, **attributes: Any) -> Any:
    """A field of a dataclass of options. Its option has the field's name, unless `names` are given;
    the field's type says what it takes, unless `type` does."""
    return field(default=default, metadata={"names": names, "help": text, **attributes})


def flag(text: str, *names: str) -> Any:
    """A field that is False, unless its option is given."""
    return option(text, *names, default=False)


def options_of(options: type) -> Callable[[Any], Any]:
    """Give a command the options of a dataclass: its own first, then those that it inherits."""
    kinds, own = get_type_hints(options), options.__annotations__
    given = sorted(fields(options), key=lambda each: each.name not in own)

    def decorate(command: Any) -> Any:
        for each in reversed(given):
            command = _click_option(each, kinds[each.name])(command)
        return command

    return decorate


def _click_option(of: Field[Any], kind: Any) -> Callable[[Any], Any]:
    attributes = {**_taken(kind), **of.metadata}
    names = attributes.pop("names") or [f"--{of.name.replace('_', '-')}"]
    if of.default is not None or "is_flag" in attributes:  # else a flag that nobody gives is False
        attributes["default"] = of.default
    return click.option(*names, of.name, **attributes)


def _taken(kind: Any) -> dict[str, Any]:
    """Returns what an option of a field of this type takes, as attributes of click's option."""
    if NoneType in get_args(kind):
        (kind,) = set(get_args(kind)) - {NoneType}
    if get_origin(kind) is Sequence:
        return {"multiple": True, **_taken(get_args(kind)[0])}
    if get_origin(kind) is Literal:
        return {"type": Choice(get_args(kind))}
    if kind is bool:
        return {"is_flag": True}
    return {"type": {int: click.IntRange(1), Path: click.Path(path_type=Path)}.get(kind, kind)}


FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """How far a model's RoPE is to reach, and how."""

    context: int | None = option(
        "Tokens that the trained model is to reach [seq-len].", type=Tokens()
    )
    rope: RopeKind | None = option("RoPE scaling that reaches the context.", type=Choice(SCALINGS))
    rope_theta: float | None = option("The base of --rope theta [by its rule].")
    rope_factor: float | None = option("Its factor [the ratio of the lengths].")
    rope_factors: Path | None = option(
        "JSON list of the factors of --rope longrope [the model's].", type=FILE
    )
    allow_beyond_reach: bool = flag("Rows beyond what its RoPE reaches.")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Which weights a training trains, in which dtype, and how many rows a step has."""

    rows_per_step: int | None = option("Rows of an optimizer step [those at once].")
    tokens_per_step: int | None = option("The same in tokens: 1M.", type=Tokens())
    lora: bool = option("Train an adapter or every weight [lora].", "--lora/--full", default=True)
    rank: int | None = option("Rank of the adapter [16].")
    also_train: Sequence[str] = option(
        "As a whole beside the adapter: embeddings,norms, or one of them.", default=()
    )
    dtype: Literal["float32", "bfloat16"] | None = option(
        "Dtype that weights load in [adapter: that of the model's config; --full: float32]."
    )
    load_in_4bit: bool = flag("The adapter's frozen weights in 4 bits.")
    host_gib: float | None = option("Memory of a machine's host [not checked].")

    def check_weights(self) -> None:
        """Refuse options of an adapter where every weight is trained."""
        if self.rank is not None and not self.lora:
            raise ValueError(
                f"--rank {self.rank} with --full: a rank is for an adapter. Use --lora."
            )
        if self.load_in_4bit and not self.lora:
            raise ValueError(
                "--load-in-4bit with --full: weights of 4 bits are frozen. Use --lora."
            )

    def rows_of(self, seq_len: int) -> int | None:
        """Rows of a step over all GPUs; None if neither option is given.

        Raises ValueError for both options, and for tokens that aren't whole rows.

        Example:
            >>> TrainingOptions(tokens_per_step=2**20).rows_of(2**15)
            32
        """
        rows, tokens = self.rows_per_step, self.tokens_per_step
        if tokens is None:
            return rows
        if rows is not None:
            raise ValueError("both --rows-per-step and --tokens-per-step are set. Choose one.")
        if tokens % seq_len:
            raise ValueError(
                f"--tokens-per-step {tokens} with --seq-len {seq_len}: a step has whole rows. Use "
                f"--tokens-per-step {nearest_multiples(tokens, seq_len)}."
            )
        return tokens // seq_len


def asked_degrees(
    *,
    num_ranks: int,
    num_nodes: int = 1,
    sequence_degree: int | None = None,
    ulysses: int | None = None,
    ring: int | None = None,
) -> tuple[int, Way | None]:
    """(How many ranks share a row, by default all; the degrees, None if no option names one).

    Raises ValueError if the degrees' product isn't the sequence degree or doesn't divide the ranks.

    Example:
        >>> asked_degrees(num_ranks=16, ring=2)
        (16, Way(ulysses=8, ring=2, layout=None))
    """
    if num_ranks % num_nodes:
        raise ValueError(
            f"--gpus {num_ranks} over --nodes {num_nodes}: --gpus counts the GPUs of all nodes, so "
            f"it is a multiple of {num_nodes}. Use --gpus {-(-num_ranks // num_nodes) * num_nodes}."
        )
    if ulysses and ring:
        degree = ulysses * ring
        if sequence_degree not in (None, degree):
            raise ValueError(
                f"--ulysses {ulysses} x --ring {ring} = {degree}, but --sequence-degree is "
                f"{sequence_degree}: the degrees must multiply to it. Leave --sequence-degree out."
            )
    else:
        degree = sequence_degree or num_ranks
    _check_divides(degree, num_ranks, ulysses, ring)
    if not (ulysses or ring):
        return degree, None
    ulysses = ulysses or degree // (ring or 1)
    return degree, Way(ulysses, degree // ulysses)


def _check_divides(degree: int, num_ranks: int, ulysses: int | None, ring: int | None) -> None:
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    given = f"--ulysses {ulysses} x --ring {ring}" if ulysses and ring else "--sequence-degree"
    require_whole_groups(given, degree, num_ranks, started=False)
    for name, value in (("ulysses", ulysses), ("ring", ring)):
        if value and degree % value:
            fitting = [d for d in divisors if degree % d == 0]
            raise ValueError(
                f"--{name} {value} with {degree} ranks per sequence: --ulysses x --ring must be "
                f"{degree}. Use --{name} {' or '.join(map(str, fitting))}, or set "
                "--sequence-degree."
            )


def require_trl(recipe: str) -> None:
    """Raise ValueError where the recipe needs TRL and it is not installed."""
    if recipe != "finetune" and find_spec("trl") is None:
        raise ValueError(
            f"the recipe {recipe} (chats, completions, preferences, rows of tokens) needs TRL, "
            'which is not installed: pip install "longctx-patch[trl]".'
        )


def gone_option(name: str, instead: str) -> Callable[[Any], Any]:
    """An option that is refused by name, with what to do instead."""

    def refuse(context: click.Context, option: click.Parameter, value: object) -> None:
        if value:
            raise click.UsageError(f"{name} is gone: {instead}.", context)

    return click.option(name, hidden=True, expose_value=False, callback=refuse)
