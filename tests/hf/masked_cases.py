"""The cases of packed rows on which masked models are compared, by the number of ranks."""

from itertools import product

from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.sequence.layout import LayoutName
from tests.hf.masked_models import MASKS, Case, Pack

SHARE = 12
"""Tokens of a rank in most of these rows."""
LAYOUTS: tuple[LayoutName | None, ...] = (None, "zigzag", "contiguous")
POLICIES: tuple[CheckpointPolicy, ...] = ("full", "none", "attention", "none")
TRAINED = ("llama", "qwen2", "gpt_oss")


def packs_of(num_ranks: int) -> dict[str, Case]:
    """Rows of `SHARE` tokens per rank, each awkward in its own way."""
    n, share = num_ranks * SHARE, SHARE
    middle = (share,) * (num_ranks - 2)
    made = {
        "on the edges": ((share,) * num_ranks,),
        "one before": ((share - 1, *middle, share + 1),) if num_ranks > 1 else ((share - 1,),),
        "one after": ((share + 1, *middle, share - 1),) if num_ranks > 1 else ((share, 1),),
        "tiny and one longer than a share": ((1, 1, 1, n - 9, 1, 2, 1, 1, 1),),
        "two rows": ((4, 1, n // 2 - 5), (n // 2 - 4, 4)),
        "mostly padding": ((5, 1, 3),),
    }
    return {name: Case("", packs, pad_to=n) for name, packs in made.items()}


def cases_of(ulysses: int, ring: int) -> list[Case]:
    """Each row once, with models, placements and policies in turn, by the number of ranks."""
    turns = enumerate(packs_of(ulysses * ring).values(), start=ulysses + ring)
    return [
        case._replace(
            model=TRAINED[turn % 3],
            ulysses=ulysses,
            ring=ring,
            layout=LAYOUTS[(turn // 2 + ring) % 3],
            checkpoint=POLICIES[turn % 4],
        )
        for turn, case in turns
    ]


def mask_cases(ulysses: int, ring: int) -> list[Case]:
    """A row of one document, one with padding, and a packed one, under every mask; the models take
    turns, and two of them have windows."""
    rows: list[tuple[Pack, int]] = [((48,), 0), ((41,), 48), ((3, 20, 1, 19), 48)]
    return [
        Case(
            TRAINED[(turn + number + ulysses) % 3],
            (pack,),
            pad_to,
            ulysses,
            ring,
            LAYOUTS[(turn + ulysses) % 3],
            mask=mask,
        )
        for (turn, mask), (number, (pack, pad_to)) in product(enumerate(MASKS), enumerate(rows))
    ]


def window_cases(ring: int) -> list[Case]:
    """Windows of one token, of about a shard, of all but a single pair of a document, of a whole
    document, and longer. The last token has no label, so its pairs change nothing."""
    n = ring * SHARE
    windows = {"mistral": (1, SHARE, SHARE + 5, n - 2), "qwen2": (SHARE + 5, n - 2, n, n + 5)}
    row = (4, SHARE + 3, n - SHARE - 9, 2)
    longest = max(row)
    found = [
        Case(model, ((n,),), ring=ring, window=window)
        for model, of_model in windows.items()
        for window in of_model
    ]
    return found + [
        Case("qwen2", (row,), ring=ring, window=window)
        for window in (longest - 2, longest, longest + 1)
    ]


CASES = {
    1: cases_of(1, 1) + mask_cases(1, 1)[::2],
    2: cases_of(1, 2),
    3: cases_of(1, 3) + mask_cases(1, 3),
    4: cases_of(1, 4) + cases_of(2, 2) + mask_cases(2, 2) + window_cases(4),
}
