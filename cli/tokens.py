"""Numbers of tokens on a command line."""

import click

from longctx_patch.rules.number_rules import parse_tokens


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
