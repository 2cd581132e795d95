"""Messages of other packages that a user can do nothing about."""

import logging
import warnings

LOGGERS = (
    "bitsandbytes",  # a missing CPU kernel, even if nothing uses it
    "liger_kernel.backends.registry",  # backends for machines that this one isn't
)
WARNINGS = (
    r"Argument .* cannot be converted to a JitArgument",  # flash-attn 4 in NVIDIA's compiler
    r"Slicing a flattened dim from root mesh",  # Accelerate's way to ask torch for a mesh
    r"`is_gradient_checkpointing`",  # peft reads a property of transformers by its old name
    r"FSDP2-wrapped module .* returned a view tensor",  # which nobody writes into
    r"You have requested `ensure_weight_tying`, but no tied modules were found",  # TRL's reference
    r"`gradient_checkpointing` is deprecated",  # which is how TRL still sets it
)
"""Beginnings of messages."""


def quiet_imports() -> None:
    """Hide what packages log while they are imported, which is before any setting is read."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def quiet_libraries(*, shown: bool = False) -> None:
    """Hide these messages in this process, or show them from here on."""
    quiet_imports()
    if shown:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.NOTSET)
    for message in WARNINGS:
        warnings.filterwarnings("default" if shown else "ignore", message=message)
