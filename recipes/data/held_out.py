"""Refuses to evaluate on what is trained."""

import os
from collections.abc import Sequence

from longctx_patch.recipes.data.addresses import TRAIN, address_of
from longctx_patch.recipes.data.readers import Part
from longctx_patch.recipes.data.sources import parts_of, splits_of


def check_evaluation(data: Sequence[str], eval_data: Sequence[str]) -> None:
    """Raise ValueError for evaluation data of which no split is named, though there are several,
    and for files or splits that are trained on too."""
    trained = {_place(part): source for source in data for part in parts_of(source)}
    for source in eval_data:
        _check_names_split(source)
        for part in parts_of(source):
            if (other := trained.get(_place(part))) is not None:
                raise ValueError(_same(source, other, part))


def _place(part: Part) -> tuple[str, str, str]:
    path = part.path if part.reader == "hub" else os.path.realpath(part.path)
    return path, part.config, part.split


def _check_names_split(source: str) -> None:
    """A source that names none is its split `train`, which is a strange one to evaluate on."""
    address = address_of(source)
    splits = splits_of(address)
    if address.split or not (address.is_hub or len(splits) > 1):
        return
    has = f"has the splits {', '.join(splits)}" if splits else "may have several splits"
    test = next((name for name in splits if name != TRAIN), "test")
    raise ValueError(
        f"eval_data {source!r} {has}: name the one to evaluate on, such as {address.named(test)}."
    )


def _same(source: str, other: str, part: Part) -> str:
    split = f", split {part.split}" if part.split else ""
    ask = "Give other files or another split"
    both = f"eval_data {source!r} and data {other!r} both read {part.path}{split}"
    splits = splits_of(address_of(source))
    if others := [name for name in splits if name != TRAIN]:
        ask = f"Name another split, such as {address_of(source).named(others[0])}"
    return (
        f"{both}, so that it would be evaluated on what it learns. {ask}; or leave eval_data out "
        "and hold rows out: eval_share: 0.02."
    )
