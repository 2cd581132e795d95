"""Numbers of tokens on a command line."""

import re
from fractions import Fraction

import click

MOST_TOKENS = 2**30
UNITS = {"k": 2**10, "m": 2**20}
NUMBER = r"(-?(?:\d[\d_]*|\d{1,3}(?:,\d{3})+)(?:\.\d+)?) ?([km]?)"
"""A comma separates thousands: 1,5M is refused, not read as 15M."""


class Tokens(click.ParamType[int]):
    """131072, 128K (times 1,024) or 1M (times 1,048,576)."""

    name = "tokens"

    def __init__(self, least: int = 2) -> None:
        self.least = least

    def convert(self, value: object, param: object, ctx: object) -> int:
        match = re.fullmatch(NUMBER, str(value).strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r}: write tokens as 131072, 128K or 1M.")
        number = Fraction(re.sub("[,_]", "", match[1])) * UNITS.get(match[2].lower(), 1)
        if number.denominator != 1 or not self.least <= number <= MOST_TOKENS:
            self.fail(f"{value!r}: give a whole number of tokens, {self.least} to {MOST_TOKENS:,}.")
        return int(number)
