"""Ids that a model has no embedding for, found on the CPU, before one rank fails alone.

On a GPU such an id ends the process in the middle of a kernel, on the rank that has the token; the
others would wait for it.
"""

from torch import nn


def vocabulary_problem(model: nn.Module, least: int, most: int) -> str | None:
    """What is wrong with tokens from `least` to `most`, in words.

    Args:
        model: has transformers' `get_input_embeddings`; adapters may wrap the table.
    """
    found = model.get_input_embeddings().modules()  # type: ignore[operator]
    table = next((module for module in found if isinstance(module, nn.Embedding)), None)
    if table is None or (least >= 0 and most < table.num_embeddings):
        return None
    return (
        f"input_ids from {least} to {most}: the model's embedding has "
        f"{table.num_embeddings} rows. Check the tokenizer against the model's vocab_size."
    )
