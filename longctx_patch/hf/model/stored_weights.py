"""The weights of a checkpoint in safetensors files, under the names that a model has for them.

Nothing but the files' headers is read until `StoredWeight.read_into` asks for rows. transformers
says which tensor of a file becomes which weight of the model, and which experts are stacked.
"""

import json
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
STACKED = (("MergeModulelist", 0),)
STACKED_PAIRS = (("MergeModulelist", 0), ("Concatenate", 1))
"""The conversions of transformers that keep each expert's rows together, as (operation, dim)."""
BLOCK_BYTES = 2**23
"""What a reader holds beside the weights, where it can't read into their place."""
READERS = 4
"""Threads with which a rank reads."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class NeedsWholeReading(ValueError):
    """A checkpoint that `from_pretrained` reads and that can't be read by rows."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its rows lie one after the other from `offset` on."""

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def read_into(self, out: Tensor, start: int, through: torch.dtype) -> None:
        """Fill `out` with the rows from `start` on. Raises ValueError naming the file."""
        if not self.shape:
            out = out.view(1)
        row_bytes = self.dtype.itemsize * out[:1].numel()
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(self.offset + start * row_bytes)
                if out.device.type == "cpu" and out.dtype == through == self.dtype:
                    self._fill(out, file)
                    return
                blocks = out.split(max(1, BLOCK_BYTES // max(1, row_bytes)))
                buffer = _buffer(blocks[0].shape, self.dtype)
                for block in blocks:
                    self._fill(buffer[: len(block)], file)
                    found = buffer[: len(block)].to(out.device)
                    block.copy_(found if through == out.dtype else found.to(through))
        except OSError as error:
            raise ValueError(f"{self.file}: {self.key} can't be read ({error}).") from error

    def _fill(self, out: Tensor, file: Any) -> None:
        array: Any = out.view(-1).view(torch.uint8).numpy()
        left = memoryview(array)
        while left:
            read = file.readinto(left)
            if not read:
                raise OSError("it ends too early")
            left = left[read:]


def _buffer(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory that the system gets back at once: malloc would keep several blocks of each thread."""
    memory = mmap(-1, max(1, shape.numel() * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel()).view(shape)


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
        for number, row in enumerate(out, start):
            sizes = [part[number].shape[0] for part in self.parts]
            for part, place in zip(self.parts, row.split(sizes), strict=True):
                part[number].read_into(place, 0, through)


def weight_files(model: str) -> list[str]:
    """The safetensors files of a folder or hub name, first downloaded if need be; else an empty
    list. Raises ValueError for an index that can't be used."""
    from transformers.utils import cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    index = cached_file(model, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        single = cached_file(model, SINGLE, _raise_exceptions_for_missing_entries=False)
        return [] if single is None else [str(single)]
    try:
        files, _ = get_checkpoint_shard_files(model, index)
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index}: not an index of safetensors files ({error!r}).") from error
    return [str(file) for file in files]


def read_headers(files: list[str]) -> dict[str, StoredTensor]:
    """The tensors of all files by their keys. Raises ValueError for a file that is cut short."""
    found = {}
    for name in files:
        try:
            safe_open(name, framework="pt", device="cpu", backend="pread")  # checks all of it
            with open(name, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{name} is not a whole safetensors file ({error}). Download it again."
            ) from error
        header.pop("__metadata__", None)
        for key, each in header.items():
            if each["dtype"] not in DTYPES:
                raise NeedsWholeReading(
                    f"{name}: {key} is of dtype {each['dtype']}, but {', '.join(DTYPES)} are read "
                    "by rows. Load the model with AutoModelForCausalLM.from_pretrained."
                )
            dtype, offset = DTYPES[each["dtype"]], 8 + size + each["data_offsets"][0]
            found[key] = StoredTensor(name, key, tuple(each["shape"]), dtype, offset)
    return found


def stored_weights(model: Any, tensors: dict[str, StoredTensor]) -> dict[str, StoredWeight]:
    """What files hold for each weight and persistent buffer of a transformers model.

    Of weights that are tied, one may be absent. Raises ValueError for what is missing, unexpected,
    of another shape, or needs a conversion that doesn't keep rows together.
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
    for name in sorted(info.missing_keys):
        raise ValueError(
            f"{where}: {name} is in none of its {len(files)} safetensors file(s). Download them "
            f"again, or take the checkpoint of a {type(model).__name__}."
        )
    for name in sorted(info.unexpected_keys):
        raise ValueError(
            f"{unexpected[name].file}: {unexpected[name].key} is no weight of a "
            f"{type(model).__name__} with this config. Take the config.json that belongs to it."
        )
    for name, weight in found.items():
        if weight.shape != expected[name]:
            shapes = " + ".join(str(list(part[0].shape)) for part in weight.parts)
            raise ValueError(
                f"{weight.file}: {weight.parts[0][0].key} has the shape {shapes}, by the config "
                f"{name} has {list(expected[name])}. Take the config.json that belongs to it."
            )
    return found


def _named(
    model: Any, expected: dict[str, tuple[int, ...]], tensors: dict[str, StoredTensor]
) -> tuple[dict[str, StoredWeight], dict[str, StoredTensor]]:
    """(what belongs to each name of the model, what belongs to none by the name it would have)."""
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
