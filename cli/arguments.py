"""What options of several commands take: one of several names, numbers of tokens, GPUs, rows of a
step; and how an option that is gone is refused."""

import re
from collections.abc import Callable
from typing import Any

import click

from longctx_patch.planner.job import nearest_multiples
from longctx_patch.rules.names import did_you_mean
from longctx_patch.rules.number_rules import parse_tokens


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


def gone_option(name: str, instead: str, *, is_flag: bool = False) -> Callable[[Any], Any]:
    """An option that is refused by name, with what to do instead."""

    def refuse(context: click.Context, option: click.Parameter, value: object) -> None:
        if value:
            raise click.UsageError(f"{name} is gone: {instead}.", context)

    return click.option(name, hidden=True, expose_value=False, is_flag=is_flag, callback=refuse)


def rows_of_step(rows: int | None, tokens: int | None, seq_len: int) -> int | None:
    """Rows of a step over all GPUs; None if neither option is given.

    Raises ValueError for both options, and for tokens that aren't whole rows.

    Example:
        >>> rows_of_step(None, 2**20, 2**15)
        32
    """
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
