"""A pretrained model over two processes against stock transformers: `make real-model MODEL=folder`.

Random weights have none of a trained model's sharp attention and large activations. So before a
release a small pretrained one, SmolLM2-135M say, trains one step on this repository's license: the
loss and every gradient, in float32, have to be those of one process. Ends with 1 if they are not.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from longctx_patch import LongContextConfig, SequenceShardCollator, patch
from longctx_patch.transport.processes import run_processes
from longctx_patch.verification.reference import one_thread, relative_error

NUM_TOKENS, NUM_RANKS = 1500, 2
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 2e-5  # relative; of a gradient in norm
LICENSE = Path(__file__).parents[1] / "LICENSE"

Errors = dict[str, float]


def load(folder: str) -> Any:
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def ways_to_share(config: Any) -> Iterator[LongContextConfig]:
    for layout in ("zigzag", "contiguous"):
        yield LongContextConfig(ring_degree=NUM_RANKS, layout=layout, checkpoint="attention")
    if config.num_attention_heads % NUM_RANKS == 0:
        yield LongContextConfig(ulysses_degree=NUM_RANKS, checkpoint="attention")


def errors_on_rank(
    rank: int, folder: str, row: list[int], config: LongContextConfig, stock_file: str
) -> Errors:
    """Relative errors of the loss and of each gradient. Collective."""
    stock = torch.load(stock_file)
    model = load(folder)
    handle = patch(model, config)
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    loss = model(**collate([{"input_ids": row}]), use_cache=False).loss
    loss.backward()
    errors = {}
    for name, right in stock.items():
        mine = loss.detach() if name == "loss" else model.get_parameter(name).grad
        dist.all_reduce(mine)
        errors[name] = relative_error(mine / NUM_RANKS, right)
    return errors


def main(folder: str) -> int:
    row = AutoTokenizer.from_pretrained(folder)(LICENSE.read_text()).input_ids[:NUM_TOKENS]
    if len(row) < NUM_TOKENS:
        print(f"{LICENSE} has {len(row)} tokens of this model, {NUM_TOKENS} are compared.")
        return 1
    ids, model = torch.tensor([row]), load(folder)
    with one_thread():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    print(f"{len(row)} tokens, {len(gradients)} gradients, stock loss {loss.item():.7f}")
    right = True
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save({"loss": loss.detach(), **gradients}, file.name)
        for config in ways_to_share(model.config):
            errors = run_processes(
                errors_on_rank, NUM_RANKS, folder, row, config, file.name, timeout_s=600.0
            )[0]
            loss_error = errors.pop("loss")
            name, worst = max(errors.items(), key=lambda item: item[1])
            right &= loss_error <= LOSS_TOLERANCE and worst <= GRADIENT_TOLERANCE
            shared = f"ring {config.ring_degree}, ulysses {config.ulysses_degree}"
            print(
                f"{shared}, {config.layout}: "
                f"loss {loss_error:.1e}, gradients {worst:.1e} at most ({name})",
                flush=True,
            )
    print("equal" if right else f"NOT equal: {LOSS_TOLERANCE:g} and {GRADIENT_TOLERANCE:g} allowed")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
