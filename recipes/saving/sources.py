"""What a run reads, in few bytes: enough to tell that a file is another one, at any size."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub

HEADER_LIMIT = 100 << 20
"""Bytes: a longer header is none, as safetensors itself has it."""
NUM_SAMPLES = 4
UNKNOWN_REVISION = "a revision that the hub did not tell"
HUB_TIMEOUT_S = 20.0
SAMPLE_BYTES = 1 << 20


def sample_of(path: Path) -> str:
    """A file's size and a digest of a sample: equal for equal files, and in all likelihood for
    those alone.

    A sample is the whole header of a safetensors file, which names dtypes and shapes, and 1 MiB at
    each of four fixed places, the first and the last byte among them.
    """
    size = path.stat().st_size
    content = hashlib.sha256()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            content.update(file.read(min(HEADER_LIMIT, 8 + int.from_bytes(file.read(8), "little"))))
        last = max(0, size - SAMPLE_BYTES)
        for number in range(NUM_SAMPLES):
            file.seek(last * number // (NUM_SAMPLES - 1))
            content.update(file.read(SAMPLE_BYTES))
    return f"{size:,} bytes, sample {content.hexdigest()[:16]}"


def samples_of(paths: Iterable[Path]) -> dict[str, str]:
    """The samples of files by their names; a file that was moved is the same. Of files in several
    folders that share a name, all samples."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        found.setdefault(path.name, []).append(sample_of(path))
    return {name: " and ".join(samples) for name, samples in found.items()}


def revision_of(dataset: str) -> str:
    """Which commit of a dataset on the hub is read."""
    try:
        found = huggingface_hub.HfApi().dataset_info(dataset, timeout=HUB_TIMEOUT_S).sha
    except Exception:  # of the network, in types of several libraries
        found = None
    return f"revision {found}" if found else UNKNOWN_REVISION


def tokenizer_digest(tokenizer: Any) -> str:
    """Equal for tokenizers that give equal tokens, specials and chats."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    said = repr((words, tokenizer.chat_template, sorted(tokenizer.special_tokens_map.items())))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def config_fields(config: Any) -> dict[str, Any]:
    """A model's config as it is trained, without what names its place and its library."""
    fields = config.to_dict()
    return {n: v for n, v in fields.items() if n[0] != "_" and n != "transformers_version"}
