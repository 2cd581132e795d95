"""Asks torch's CUDA allocator for segments that grow, in place of segments of fixed size.

Tensors of a long row have a few sizes, up to some GiB, and live for as long as a layer or a whole
pass. In segments of fixed size, the gaps between them are lost to larger ones: on an H200 with
Llama-3.1-8B's layers and rows of 131,072 tokens, a pass ran out of memory with a fifth of it free.
Segments that grow (`expandable_segments:True`) are joined and given back in parts.
"""

import os

import torch

SETTING = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def let_segments_grow() -> None:
    """Set `PYTORCH_ALLOC_CONF` for this process, unless the allocator is configured already.

    Call it before CUDA starts, when torch reads the variable; later it does nothing.
    """
    if torch.cuda.is_initialized() or any(os.environ.get(name) for name in VARIABLES):
        return
    os.environ[VARIABLES[0]] = SETTING


def segments_grow() -> bool:
    """Says whether any segment that this process has taken on CUDA devices can grow."""
    segments = torch.cuda.memory_snapshot(include_traces=False)
    return any(segment.get("is_expandable", False) for segment in segments)
