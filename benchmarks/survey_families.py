"""Which model families would be exact? `python benchmarks/survey_families.py [MODEL_TYPE ...]`

Builds a tiny model of every causal language model that the installed transformers knows, patches it
on two virtual ranks as if its family were supported, and compares loss and every gradient with its
stock self: once over a ring with the loss inside the head, once by Ulysses with the loss from
logits. Prints a line for each. The table of support (longctx_patch/hf/model) is made from this: a
family that differs or fails is refused with the reason that is found here.

A tiny model has transformers' defaults where this file has no size for them, so an equal family may
still have options that aren't switched on: those go into `_FEATURES` of tests/hf/tiny.py.
"""

import argparse
import signal
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longctx_patch import LongContextConfig
from longctx_patch.hf.loss import lm_head
from longctx_patch.hf.model import checks
from longctx_patch.hf.model.family import Family
from longctx_patch.hf.model.supported import FAMILIES
from longctx_patch.verification.virtual_ranks import TOLERANCE, verify_on_virtual_ranks

VOCABULARY, LENGTH, LIMIT_S = 97, 43, 60
WAYS = {
    "ring, loss in the head": LongContextConfig(ring_degree=2),
    "Ulysses, loss from logits": LongContextConfig(ulysses_degree=2, loss="logits"),
}
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_shared_experts", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
}
DRAWN = ("dropout", "_pdrop", "dropout_prob", "dropout_rate", "jitter_noise", "layerdrop")
"""Ends of the names of options that draw random numbers."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
OF_OTHER_INPUTS = ("vision_config", "audio_config", "vq_config", "text_config")


def tiny_config(model_type: str) -> Any:
    """Transformers' defaults, with small sizes and without random numbers."""
    default = AutoConfig.for_model(model_type)
    options = default.to_dict()
    others = [name for name in OF_OTHER_INPUTS if options.get(name) is not None]
    if others:
        raise ValueError(f"it has a {others[0]}: not a decoder of text alone")
    known = {name for name in SIZES if hasattr_somewhere(default, name)}
    sizes = {name: SIZES[name] for name in known if options.get(name, 0) is not None}
    noise = {name: 0.0 for name, value in options.items() if name.endswith(DRAWN) and value}
    ids = {name: 0 for name in TOKEN_IDS if isinstance(options.get(name), int | list)}
    return AutoConfig.for_model(model_type, **sizes | noise | ids, attn_implementation="eager")


def hasattr_somewhere(config: Any, name: str) -> bool:
    """Whether a config has an option, perhaps another one for each layer."""
    try:
        return hasattr(config, name)
    except RuntimeError:  # layers differ in it
        return True


def tiny_model(model_type: str) -> PreTrainedModel:
    """A model whose norms aren't 1 and whose biases and sinks aren't 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.train()


@contextmanager
def as_if_supported(model_type: str) -> Iterator[None]:
    """Within the context this family has a row in the table of support."""
    row = FAMILIES.get(model_type, Family(model_type=model_type, name=model_type))
    table = {**FAMILIES, model_type: row}
    with ExitStack() as stack:
        for module in (checks, lm_head):
            stack.enter_context(mock.patch.object(module, "FAMILIES", table))
        stack.enter_context(mock.patch.object(checks, "refusal_of", return_value=None))
        yield


def compared(model: PreTrainedModel, config: LongContextConfig) -> str:
    """The verdict of one way to cut rows, in a line."""
    seed = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=seed)
    try:
        found = verify_on_virtual_ranks(
            model, config, {"input_ids": ids, "labels": ids}, timeout_s=LIMIT_S
        )
    except Exception as error:  # a survey goes on: what went wrong is its result
        return f"fails: {' '.join(str(error).split())[:300]}"
    worst = found.worst_parameter
    errors = f"loss {found.loss_rel_err:.0e}, {worst} {found.grad_rel_errs[worst]:.0e}"
    return f"{'equal' if found.ok else f'NOT equal within {TOLERANCE:g}'}: {errors}"


def survey(model_type: str) -> dict[str, str]:
    """What each way to cut rows gives; what building the model gives, if that fails."""
    try:
        model = tiny_model(model_type)
    except Exception as error:
        return {"build": f"fails: {' '.join(str(error).split())[:300]}"}
    with as_if_supported(str(model.config.model_type)):
        return {name: compared(model, config) for name, config in WAYS.items()}


def too_slow(*_: object) -> None:
    raise TimeoutError(f"it took more than {LIMIT_S} s: its default sizes are not all known here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model_types", nargs="*", help="default: all that transformers knows")
    asked = parser.parse_args().model_types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, too_slow)
    for model_type in asked:
        signal.alarm(LIMIT_S)
        for way, verdict in survey(model_type).items():
            print(f"{model_type:24} {way:26} {verdict}", flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
