"""Finds the reader of a file, by its name and its first bytes.

Names count whether they have capitals or not. What has no reader is read as one text, unless it is
none: compressed, a table of another form, weights, or anything with bytes that no text has.
"""

import codecs
import shlex
from pathlib import Path

from longctx_patch.recipes.data.readers import UTF_16, ZERO_BYTE, Reader, not_utf8
from longctx_patch.recipes.data.records import BadRecord

READERS: dict[str, Reader] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    **{".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"},
}
TABLE_FILES = (".parquet", ".arrow")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".zip", ".7z", ".rar", ".tar", ".tgz")
_UNREAD = (
    *_PACKED,
    *(".tsv", ".xls", ".xlsx", ".ods", ".orc", ".avro", ".feather", ".db", ".sqlite"),
    *(".npy", ".npz", ".h5", ".hdf5", ".pkl", ".pickle", ".tfrecord", ".lance", ".mds"),
    *(".bin", ".safetensors", ".pt", ".pth", ".ckpt", ".onnx"),
    *(".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ppt", ".pptx", ".ps", ".djvu"),
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ico"),
    *(".wav", ".mp3", ".flac", ".ogg", ".mp4", ".avi", ".mov", ".webm"),
)
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"%PDF": "PDF",
}
_POINTER = b"version https://git-lfs"
_LEAVE_OUT = " Or leave it out, for example with a glob: 'folder/**/*.txt'"
SNIFFED_BYTES = 2**13


def reader_of(file: Path) -> Reader:
    """Raises BadRecord for a file that is neither records nor text."""
    suffix = file.suffix.lower()
    if suffix == ".gguf" or _first_bytes(file, 4) == b"GGUF":
        raise BadRecord(
            f"{file} is a GGUF file, a model in the format of llama.cpp, and no data. As a model, "
            f"`longctx patch {shlex.quote(str(file))}` says how to convert it.{_LEAVE_OUT}"
        )
    if suffix in _UNREAD:
        unpack = "Unpack it, or write" if suffix in _PACKED else "Write"
        raise BadRecord(
            f"{file}: {suffix} files are not read. {unpack} what is in it as .jsonl, .csv, "
            f".parquet or text.{_LEAVE_OUT}"
        )
    reader = READERS.get(suffix, "text")
    _check_head(file, is_table=suffix in TABLE_FILES)
    return reader


def _first_bytes(file: Path, number: int) -> bytes:
    with file.open("rb") as opened:
        return opened.read(number)


def _check_head(file: Path, *, is_table: bool) -> None:
    """Look at the first bytes of a file, which are text unless it is a table."""
    head = _first_bytes(file, SNIFFED_BYTES)
    if head.startswith(_POINTER):
        raise BadRecord(f"{file} is a pointer of git-lfs: run `git lfs pull` in its folder.")
    if is_table:
        return
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            raise BadRecord(f"{file} holds {name} data, not text. Unpack it.{_LEAVE_OUT}")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        if 0 not in head or head.startswith(UTF_16):
            raise BadRecord(f"{not_utf8(str(file))}.{_LEAVE_OUT}") from error
    if 0 in head:
        line = head[: head.index(0)].count(b"\n") + 1
        raise BadRecord(f"{file}, line {line}: {ZERO_BYTE}{_LEAVE_OUT}")
