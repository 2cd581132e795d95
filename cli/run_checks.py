"""What `longctx patch` checks before it decides anything: the folder, the text, the length."""

from pathlib import Path
from typing import Any

from longctx_patch.hf.model.rope import reachable_length
from longctx_patch.recipes import texts


def check_out(out: Path, folder: Path) -> None:
    """Refuse a folder that holds files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--out {str(out)!r} holds files: a run folder is new or empty, so that nothing is "
            "overwritten. Give another folder, or remove this one."
        )


def check_text(source: str) -> None:
    """Read the first document only: the recipe reads them all."""
    try:
        found = next(iter(texts.read_documents([source], "text")), None)
    except ValueError as error:
        raise ValueError(
            f"--data {source}: {error} `longctx patch` reads the field 'text' only: leave --data "
            "out, and set text: and text_field: in the run folder's finetune.yaml."
            if "--text-field" in str(error)
            else f"--data {source}: {error}"
        ) from error
    if not found:
        raise ValueError(f"--data {source}: no text in it. Give files or folders with text.")


def check_length(config: Any, seq_len: int, rope: str | None, factor: float | None) -> None:
    """Refuse a length that the RoPE asked for does not reach, and scaling without need."""
    reach = reachable_length(config)
    if rope is None and factor is not None:
        raise ValueError(
            f"--rope-factor {factor:g} without --rope: a factor belongs to a kind of scaling. "
            "Add --rope yarn (or linear or dynamic)."
        )
    if rope is None:
        if "dynamic" in rope_types(config.rope_parameters):
            raise ValueError(
                "this model's RoPE is of type 'dynamic': its frequencies follow the length that "
                "each process sees. Add --rope dynamic, which freezes them at --seq-len."
            )
        scaled = [kind for kind in rope_types(config.rope_parameters) if kind != "default"]
        if seq_len > reach and scaled:
            raise ValueError(
                f"--seq-len {seq_len}: this model's RoPE is scaled already ({', '.join(scaled)}), "
                f"and reaches {reach} tokens; scaling twice is not defined. Use --seq-len {reach}, "
                "or a config.json with rope_parameters and max_position_embeddings for that length."
            )
        if seq_len > reach:
            raise ValueError(
                f"--seq-len {seq_len}: this model reaches {reach} tokens, so its RoPE must be "
                f"scaled. Add --rope yarn (or linear or dynamic), or use --seq-len {reach}."
            )
    elif seq_len <= reach and rope_types(config.rope_parameters) != [rope]:
        raise ValueError(
            f"--rope {rope} with --seq-len {seq_len}: this model already reaches {reach} tokens, "
            "and scaling would only blur positions. Leave --rope out."
        )


def rope_types(rope: dict[str, Any]) -> list[str]:
    """The type of RoPE that all layers have, or those of each kind of layer."""
    kinds = [rope] if "rope_type" in rope else rope.values()
    return list(dict.fromkeys(kind["rope_type"] for kind in kinds))
