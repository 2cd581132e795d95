"""`longctx merge`: an adapter into the weights of its base, file by file."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from longctx_patch.cli.arguments import Choice
from longctx_patch.families.text_part import auto_class_name

if TYPE_CHECKING:
    from longctx_patch.recipes.merge import Merged


@click.command("merge", short_help="Merge an adapter into the weights of its base.")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--out", type=click.Path(path_type=Path), help="New folder [merged, beside the adapter's]."
)
@click.option(
    "--dtype",
    type=Choice(("float32", "bfloat16", "float16")),
    help="Dtype of all weights [as in the base's files].",
)
@click.option("--base", default="", help="Hub name or folder [the one that the adapter names].")
def merge_command(run: Path, out: Path | None, dtype: str | None, base: str) -> None:
    """Merge the adapter of RUN (a run folder, its final/, a checkpoint-N or any LoRA adapter
    of peft) into the weights of its base.

    The new folder has the base's files and names of weights, with the RoPE and context length of
    the run, its tokenizer and chat template: plain transformers and vLLM load it. Sums are made in
    float32 and rounded once. Files are read and written one by one, so host memory holds one of
    them. What can't be merged exactly is refused by name.
    """
    import torch

    from longctx_patch.recipes.merge import find_adapter, merge

    adapter = find_adapter(run)
    target = out or adapter.parent / "merged"
    click.echo(
        render(merge(adapter, target, base=base, dtype=getattr(torch, dtype) if dtype else None))
    )


def render(merged: "Merged") -> str:
    """Returns what was written, and how to serve it."""
    config = merged.config
    rope = getattr(config, "rope_parameters", None) or {}
    length = config.max_position_embeddings
    lines = [
        f"Merged into {merged.base}: {merged.num_changed} of {merged.num_tensors} tensors changed.",
        f"Context: {length} tokens, RoPE {rope.get('rope_type', 'per kind of layer')}.",
    ]
    if merged.is_from_4bit:
        lines.append(
            "The adapter was trained over weights rounded to 4 bits, and is merged into the ones "
            "that were not: losses differ a little from those of the run."
        )
    folder, loader = shlex.quote(str(merged.folder)), auto_class_name(config)
    return "\n".join(
        [
            *lines,
            f"Written to {merged.folder}; {loader}.from_pretrained loads it. Serve it:",
            "",
            f"  vllm serve {folder} --max-model-len {length}",
        ]
    )
