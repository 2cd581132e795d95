"""What `longctx patch` checks before it decides anything: the folder and the weights."""

from pathlib import Path


def check_out(out: Path, folder: Path) -> None:
    """Refuse a folder that holds files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--out {str(out)!r} holds files: a run folder is new or empty, so that nothing is "
            "overwritten. Give another folder, or remove this one."
        )


def check_weights(*, lora: bool, rank: int | None, load_in_4bit: bool) -> None:
    """Refuse options of an adapter where every weight is trained; `longctx plan` does too."""
    if rank is not None and not lora:
        raise ValueError(f"--rank {rank} with --full: a rank is for an adapter. Use --lora.")
    if load_in_4bit and not lora:
        raise ValueError("--load-in-4bit with --full: weights of 4 bits are frozen. Use --lora.")
