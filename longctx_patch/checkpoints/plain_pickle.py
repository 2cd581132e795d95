"""Distributed checkpoints of torch without running what a pickle in them may say.

torch keeps a pickle of its own classes as `.metadata`, and numbers of the optimizer pickled among
the tensors. Here both are read with an allow-list: a pickle that names anything else is refused
before it can call it. A checksum can't do that, since whoever writes a file can write its checksum.
"""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"
CLASSES = {
    torch_metadata.__name__: (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),  # looks a layout up by its name
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),  # from Python 3.13 on
}
"""All that torch's metadata is made of, by module; dtypes of torch are allowed beside them."""


class NotPlain(ValueError):
    """A pickle names something that no checkpoint has."""


class MetadataReader(dcp.FileSystemReader):
    """torch's reader, which unpickles `.metadata` by the allow-list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        path = Path(self.path) / METADATA
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, dcp.Metadata):
            raise NotPlain(f"{path} holds a {type(metadata).__name__}, not torch's Metadata")
        if metadata.storage_meta is None:
            metadata.storage_meta = torch_metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """torch's planner, which takes numbers, strings and their lists, and no other pickles."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # torch itself loads it without this limit
        value.seek(0)
        super().load_bytes(read_item, value)


def load_plain(content: dict[str, Any], folder: Path, *, alone: bool = False) -> None:
    """Fill `content` from a distributed checkpoint; every process calls this, or one `alone`.

    Raises NotPlain, or torch's errors, for pickles that are more than data.
    """
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    one_process_is_fine()
    dcp.load(
        content,
        storage_reader=MetadataReader(folder),
        planner=PlainPlanner(),
        no_dist=alone or not has_group,
    )


def one_process_is_fine() -> None:
    """Silence torch's warning of a single process, which `no_dist` already announces. For good:
    a filter that comes and goes would be another thread's as well."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def not_plain(checkpoint: Path) -> list[str]:
    """Says what in the distributed checkpoints below a folder is more than data, in words that
    begin with a file's name. For readers that are not ours, before they read."""
    found = []
    for path in sorted(checkpoint.rglob(METADATA)):
        name = path.relative_to(checkpoint).as_posix()
        try:
            _look_through(path.parent)
        except NotPlain as error:
            found.append(f"{name} is not safe to read: {error}")
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, RuntimeError) as error:
            found.append(f"{name} can't be read: {error}")
    return found


def _look_through(folder: Path) -> None:
    metadata = MetadataReader(folder).read_metadata()
    kinds = metadata.state_dict_metadata
    for index, place in (metadata.storage_data or {}).items():
        if isinstance(kinds.get(index.fqn), torch_metadata.BytesStorageMetadata):
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                value = io.BytesIO(file.read(place.length))
            try:
                torch.load(value, weights_only=True)
            except pickle.UnpicklingError as error:
                reason = str(error).split("\n", 1)[0]
                raise NotPlain(f"{index.fqn} in {place.relative_path}: {reason}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise NotPlain(f"it names {module}.{name}, which torch's metadata has no use for")
