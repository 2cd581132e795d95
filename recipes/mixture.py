"""Mixtures of long and short documents by shares of the tokens.

A document that a row can't hold is cut into pieces of a row's length and a rest. A piece is long
from a number of tokens on (`least`, default: a whole row), else short. Rows hold long pieces or
short ones, packed best fit first, and no document sees another.
"""

import math
from typing import NamedTuple

from longctx_patch.rules.names import did_you_mean
from longctx_patch.rules.number_rules import parse_tokens


class Mixture(NamedTuple):
    """The shares of all tokens that long and short documents have."""

    long: float
    short: float
    least: int = 0
    """Tokens from which a document is long; 0: from a whole row."""
    source: str = ""
    """Where the shares are from."""

    def least_of(self, seq_len: int) -> int:
        """From how many tokens a document is long in rows of `seq_len`."""
        return self.least or seq_len


PRESETS = {
    "prolong": Mixture(0.6, 0.4, source="ProLong, arXiv 2410.02660"),
    "olmo3": Mixture(0.34, 0.66, 8192, source="OLMo 3, arXiv 2512.13961"),
}
"""ProLong's long documents fill a row, OLMo 3's have 8K tokens or more."""
EXAMPLE = (
    "Give prolong, olmo3 or shares that add up to 1: long=0.6,short=0.4; with from=16K a document "
    "is long from so many tokens."
)


def read_mixture(text: str) -> Mixture:
    """A preset by its name, or `long=SHARE,short=SHARE[,from=TOKENS]`. Raises ValueError."""
    if text in PRESETS:
        return PRESETS[text]
    pairs = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if not pairs.keys() <= {"long", "short", "from"} or not pairs.keys() >= {"long", "short"}:
        raise ValueError(f"mixture={text!r}:{did_you_mean(text, PRESETS)} {EXAMPLE}")
    try:
        long, short = float(pairs["long"]), float(pairs["short"])
        least = parse_tokens(pairs["from"]) if "from" in pairs else 0
    except ValueError as error:
        raise ValueError(f"mixture={text!r}: {error} {EXAMPLE}") from error
    if not (0 < long < 1 and 0 < short < 1 and math.isclose(long + short, 1, abs_tol=1e-6)):
        raise ValueError(f"mixture={text!r} adds up to {long + short:g}. {EXAMPLE}")
    return Mixture(long, short, least)
