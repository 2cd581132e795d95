"""config.json of a model that was written, as readers before transformers 5 need it too."""

import json
from pathlib import Path

from transformers import PreTrainedConfig


def write_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write config.json, with RoPE under both of its names."""
    config.save_pretrained(folder)
    add_older_rope_names(folder)


def add_older_rope_names(folder: Path) -> None:
    """Give config.json RoPE also under the names that readers before transformers 5 know.

    Without them, such a reader would silently compute with its default RoPE.
    """
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    rope = content.get("rope_parameters") or {}
    if "rope_type" not in rope:
        return  # RoPE per kind of layer has no older name
    names = ("rope_theta", "partial_rotary_factor")
    content |= {name: rope[name] for name in names if name in rope}
    if rope["rope_type"] != "default":
        content["rope_scaling"] = {k: v for k, v in rope.items() if k not in names}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
