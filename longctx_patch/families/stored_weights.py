"""The weights of a checkpoint in safetensors files, under the names that a model has for them.

transformers says which tensor of a file becomes which weight of the model, and which experts are
stacked.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from longctx_patch.families.stored_tensors import NeedsWholeReading, StoredTensor

STACKED = (("MergeModulelist", 0),)
STACKED_PAIRS = (("MergeModulelist", 0), ("Concatenate", 1))
"""The conversions of transformers that keep each expert's rows together, as (operation, dim)."""
SAMPLED_ROWS = 8
"""So many rows of tied weights that are stored twice are compared before all is read."""


@dataclass(frozen=True)
class StoredWeight:
    """One weight of the model: a tensor, or several that are stacked along the first dimension."""

    parts: tuple[tuple[StoredTensor, ...], ...]
    """Row `n` of a stacked weight is the n-th tensor of each part, one part below the other."""
    stacked: bool

    @property
    def file(self) -> str:
        return self.parts[0][0].file

    @property
    def keys(self) -> list[str]:
        """The names in the files."""
        return [tensor.key for part in self.parts for tensor in part]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """None where the parts don't fit together."""
        first = [part[0].shape for part in self.parts]
        if not self.stacked:
            return first[0]
        alike = all({t.shape for t in part} == {part[0].shape} for part in self.parts)
        if not alike or len({len(p) for p in self.parts}) > 1 or len({s[1:] for s in first}) > 1:
            return None
        return (len(self.parts[0]), sum(shape[0] for shape in first), *first[0][1:])

    def read_into(self, out: Tensor, start: int, through: torch.dtype) -> None:
        """Fill `out`, contiguous, of any dtype and device, with the rows from `start` on.

        Values are rounded to `through` before they are made `out`'s. Raises ValueError naming the
        file that can't be read.
        """
        if not self.stacked:
            self.parts[0][0].read_into(out, start, through)
            return
        for tensor, place in self._stacked_in(out, start):
            tensor.read_into(place, 0, through)

    def tensors_in(self, whole: Tensor) -> dict[str, Tensor]:
        """Returns the places of the files' tensors in all rows of the weight, by their keys."""
        if not self.stacked:
            return {self.parts[0][0].key: whole}
        return {tensor.key: place for tensor, place in self._stacked_in(whole, 0)}

    def _stacked_in(self, rows: Tensor, start: int) -> Iterator[tuple[StoredTensor, Tensor]]:
        for number, row in enumerate(rows, start):
            sizes = [part[number].shape[0] for part in self.parts]
            for part, place in zip(self.parts, row.split(sizes), strict=True):
                yield part[number], place


ALLOW = (
    "Or allow it by name (--allow-weights NAME ..., `allow_weights:` in the settings): a missing "
    "weight is then random, and an unexpected one is left out."
)


def is_allowed(name: str, allowed: Iterable[str]) -> bool:
    """Says whether a weight's name is one of `allowed`, or fits a pattern of them (`*.bias`)."""
    return any(fnmatchcase(name, pattern) for pattern in allowed)


def differ_though_tied(where: str, names: Iterable[str]) -> ValueError:
    """The error of weights that a config ties, and a checkpoint holds apart."""
    return ValueError(
        f"{where}: {' and '.join(names)} differ, but the config ties them. Put "
        "tie_word_embeddings: false into config.json."
    )


def stored_weights(
    model: Any, tensors: dict[str, StoredTensor], allowed: Sequence[str] = ()
) -> dict[str, StoredWeight]:
    """Returns what files hold for each weight and persistent buffer of a transformers model.

    Of weights that are tied, one may be absent.

    Args:
        allowed: names, or patterns of names, of weights that may be missing or unexpected.

    Raises:
        ValueError: a weight is missing, unexpected, or of another shape; weights are tied by the
            config alone, as far as their first rows show it.
        NeedsWholeReading: one is missing and allowed, so that it is drawn at random, or needs a
            conversion that doesn't keep rows together.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found, unexpected = _named(model, expected, tensors)
    tied = model.all_tied_weights_keys
    partners = {**tied, **{source: target for target, source in tied.items()}}
    absent = {name for name in expected if {name, partners.get(name)}.isdisjoint(found)}
    info = SimpleNamespace(missing_keys=absent, unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(info)  # what transformers doesn't mind either
    files = {tensor.file for tensor in tensors.values()}
    where = ", ".join({str(Path(file).parent) for file in files}) or "the checkpoint"
    kind = type(model).__name__
    for name in sorted(info.missing_keys):
        if not is_allowed(name, allowed):
            raise ValueError(
                f"{where}: {name} is in none of its {len(files)} safetensors file(s). Download "
                f"them again, or take the checkpoint of a {kind}. {ALLOW}"
            )
    for name in sorted(info.unexpected_keys):
        if not is_allowed(unexpected[name].key, allowed):
            raise ValueError(
                f"{unexpected[name].file}: {unexpected[name].key} is no weight of a {kind} with "
                f"this config. Take the config.json that belongs to it. {ALLOW}"
            )
    for name, weight in found.items():
        if weight.shape != expected[name]:
            shapes = " + ".join(str(list(part[0].shape)) for part in weight.parts)
            raise ValueError(
                f"{weight.file}: {weight.parts[0][0].key} has the shape {shapes}, by the config "
                f"{name} has {list(expected[name])}. Take the config.json that belongs to it."
            )
    for name, other in tied.items():
        if {name, other} <= found.keys() and not _begin_alike(found[name], found[other]):
            raise differ_though_tied(found[name].file, (other, name))
    if info.missing_keys:
        raise NeedsWholeReading(
            f"{where}: {', '.join(sorted(info.missing_keys))} is allowed to be missing, and random."
        )
    return found


def places_of(
    model: Any, tensors: dict[str, StoredTensor], names: Container[str]
) -> dict[str, StoredWeight]:
    """Returns what files hold for these weights of a transformers model, as far as they hold them.

    Raises NeedsWholeReading where a conversion of one doesn't keep rows together.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found, _ = _named(model, expected, tensors, names)
    return {name: weight for name, weight in found.items() if name in names}


def _begin_alike(weight: StoredWeight, other: StoredWeight) -> bool:
    """Says whether the first rows of two weights of one shape are equal."""
    assert weight.shape is not None
    rows = [torch.empty(min(SAMPLED_ROWS, weight.shape[0]), *weight.shape[1:]) for _ in range(2)]
    for each, out in zip((weight, other), rows, strict=True):
        each.read_into(out, 0, out.dtype)
    return torch.equal(*rows)


def _named(
    model: Any,
    expected: dict[str, tuple[int, ...]],
    tensors: dict[str, StoredTensor],
    names: Container[str] | None = None,
) -> tuple[dict[str, StoredWeight], dict[str, StoredTensor]]:
    """(what belongs to each name of the model, what belongs to none by the name it would have).

    Weights that are made of several tensors are left out unless they are in `names`, if given.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, unexpected = model.base_model_prefix, {}
    stacks: dict[str, dict[str, list[StoredTensor]]] = {}
    found = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            unexpected[name] = tensors[key]
        elif pattern is None:
            found[name] = StoredWeight(((tensors[key],),), stacked=False)
        else:
            stacks.setdefault(name, {}).setdefault(pattern, []).append(tensors[key])
    for name, parts in stacks.items():
        if names is not None and name not in names:
            continue
        converter = by_pattern[next(iter(parts))]
        _require_rows(name, converter)
        patterns = [pattern for pattern in converter.source_patterns if pattern in parts]
        found[name] = StoredWeight(tuple(tuple(parts[p]) for p in patterns), stacked=True)
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]  # for saving
    return found, unexpected


def _require_rows(name: str, converter: Any) -> None:
    operations = tuple(
        (type(each).__name__, getattr(each, "dim", None)) for each in converter.operations
    )
    if operations not in (STACKED, STACKED_PAIRS):
        raise NeedsWholeReading(
            f"{name} is converted by {list(converter.operations)} while loading, which is not done "
            "by rows here. Load the model with AutoModelForCausalLM.from_pretrained."
        )
