"""Tensors in the safetensors files of a checkpoint, of which only headers are read until
`StoredTensor.read_into` asks for rows."""

import json
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BLOCK_BYTES = 2**23
"""What a reader holds beside the weights, where it can't read into their place."""
READERS = 4
"""Threads with which a rank reads."""
LFS = b"version https://git-lfs"
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


def weight_files(model: str) -> list[str]:
    """The safetensors files of a folder or hub name, first downloaded if need be; else an empty
    list. Raises ValueError for an index that can't be used."""
    from transformers.utils import cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    index = cached_file(model, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        single = cached_file(model, SINGLE, _raise_exceptions_for_missing_entries=False)
        return [] if single is None else [str(single)]
    files_of_index(Path(index))
    files, _ = get_checkpoint_shard_files(model, index)
    for file in files:
        if not Path(file).exists():
            raise ValueError(
                f"{file} is not there, and {index} names it. Download it again, or the index that "
                "belongs to the files."
            )
    return [str(file) for file in files]


def files_of_index(index: Path) -> dict[str, str]:
    """The file that holds each tensor, as an index says. Raises ValueError for what is no index,
    and for files beyond its folder."""
    try:
        files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        paths = {PurePath(file) for file in files.values()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not an index of safetensors files ({error!r}).") from error
    for path in sorted(paths):
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"{index} names {str(path)!r}: files of a checkpoint lie in its own folder. "
                "Download it again, from whom you trust."
            )
    return files


def read_headers(files: list[str], *, others: bool = False) -> dict[str, StoredTensor]:
    """The tensors of all files by their keys. Raises ValueError for a file that is cut short, and
    for dtypes that are not read by rows unless there may be `others`, which are left out."""
    found = {}
    for name in files:
        try:
            safe_open(name, framework="pt", device="cpu", backend="pread")  # checks all of it
            with open(name, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{name} is not a whole safetensors file ({error}). {_advice(name)}"
            ) from error
        header.pop("__metadata__", None)
        for key, each in header.items():
            if each["dtype"] not in DTYPES:
                if others:
                    continue
                raise NeedsWholeReading(
                    f"{name}: {key} is of dtype {each['dtype']}, but {', '.join(DTYPES)} are read "
                    "by rows. Load the model with AutoModelForCausalLM.from_pretrained."
                )
            dtype, offset = DTYPES[each["dtype"]], 8 + size + each["data_offsets"][0]
            found[key] = StoredTensor(name, key, tuple(each["shape"]), dtype, offset)
    return found


def _advice(name: str) -> str:
    with suppress(OSError), open(name, "rb") as file:
        if file.read(len(LFS)) == LFS:
            return "It is a pointer of git-lfs: run `git lfs pull` in its folder."
    return "Download it again."
