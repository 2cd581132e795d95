"""A tiny byte-level Llama and a text, made on the spot."""

import json
from pathlib import Path

import pytest

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """config.json of a model that has seen 64 tokens."""
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY_LLAMA))
    return path


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """5,000 bytes in which no two lines are alike."""
    path = tmp_path / "text.txt"
    lines = (f"{number} times {number + 3} is {number * (number + 3)}.\n" for number in range(999))
    path.write_text("".join(lines)[:5000])
    return path
