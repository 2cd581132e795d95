"""Which model families are exact? `python benchmarks/survey_families.py [--write] [MODEL_TYPE ...]`

Builds a tiny model of every causal language model and of every model of images and text that the
installed transformers knows, patches it on two virtual ranks as if its family were supported, and
compares loss and every gradient with its stock self, in float64 and in float32, over a ring and by
Ulysses. Families that tests know are built as in tests, with all features that the table names;
others have transformers' defaults, or the options in OPTIONS, in small sizes.

`--write` puts what was found into `longctx_patch/hf/model/survey.json`, which `longctx families`
prints and tests compare with the table of support.
"""

import argparse
import copy
import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the models of the tests

from longctx_patch import LongContextConfig, patch, run_virtual_ranks, virtual_group
from longctx_patch.hf import patching
from longctx_patch.hf.loss import lm_head
from longctx_patch.hf.model import checks
from longctx_patch.hf.model.family import Family
from longctx_patch.hf.model.supported import FAMILIES, TABLE
from longctx_patch.transport import VirtualTransport
from longctx_patch.verification.shrink import keep_float64
from tests.hf.float64 import backward, stock_loss
from tests.hf.seeing import IMAGE, WHOLE, seeing_model
from tests.hf.tiny import SUPPORTED, featured_model
from tests.reference import relative_error

FILE = Path(__file__).parents[1] / "longctx_patch" / "hf" / "model" / "survey.json"
VOCABULARY, LENGTH, LIMIT_S = 97, 43, 120
WAYS: dict[str, dict[str, Any]] = {"ring": {"ring_degree": 2}, "Ulysses": {"ulysses_degree": 2}}
EXACT = 1e-10
"""The largest relative error of a float64 step that is called equal."""
ROUNDING = 1e-12
"""A gradient that is smaller than this share of all is zero but for rounding."""
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
DEPTHS = ("depth", "num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers")
"""What gives the layers of a part that reads images or sound, of which one is built."""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
LATENT = HEADS | {"head_dim": 8, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT |= {"kv_lora_rank": 20, "q_lora_rank": 24}
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mamba", "falcon_mamba", "rwkv", "xlstm"), HEADS),
    "mamba2": HEADS
    | {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "chunk_size": 8},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2, "index_head_dim": 16}
    | {"layer_types": ["minimax_m3_sparse"] * 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        **{"index_topk": 2, "index_head_dim": 16, "index_n_heads": 4},
    },
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2"), LATENT | {"index_topk": 5}),
    "hy_v4": {"index_topk": 5},
    "dots3_note_text": {"num_key_value_heads": 4, "index_topk": 5},
    "longcat_flash": LATENT,
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xlnet": {"max_position_embeddings": None},
    "xmod": {"default_language": "en_XX"},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen4_exp_text": {
        "eos_token_id": 0,
        **{"ple_layer_ids": [1], "ple_embed_dim": 64, "ngram_vocab_size_base": 50},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 4},
        **{"heads_per_ngram": 2, "split_ngram_parts": 1, "hc_lowrank": 8},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 12},
    },
    "zaya": {"num_experts_per_tok": 1},
    "mistral4": LATENT | {"head_dim": None},
    **dict.fromkeys(("deepseek_v3", "deepseek_ocr2_text"), LATENT),
    "bailing_hybrid": {"num_key_value_heads": 4},
}
"""Options without which a model can't be built so small, or lacks what sets its family apart; None:
the default."""
DRAWN = ("dropout", "_pdrop", "dropout_prob", "dropout_rate", "jitter_noise", "layerdrop")
"""Ends of the names of options that draw random numbers."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOO_LARGE = "it takes too much time or memory: its sizes are not all known here"
Steps = list[dict[str, Tensor]]
"""Of each rank the loss and every gradient, by name."""


def known() -> list[str]:
    """Every model type that is surveyed, in the table's order."""
    mapped = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return list(dict.fromkeys([*(f.model_type for f in TABLE if f.model_type in mapped), *mapped]))


def tiny_config(model_type: str) -> Any:
    """Transformers' defaults, with small sizes and without random numbers."""
    default = AutoConfig.for_model(model_type)
    parts = {name: tiny_part(default, name) for name in default.sub_configs if named(default, name)}
    return AutoConfig.for_model(model_type, **shrunk(default) | parts, attn_implementation="eager")


def named(config: Any, part: str) -> bool:
    return getattr(config, part, None) is not None


def tiny_part(config: Any, name: str) -> dict[str, Any]:
    """The options of one part of a model: its text model is small, and others have one layer."""
    part = getattr(config, name)
    options: dict[str, Any] = part.to_dict()
    if name in ("text_config", "decoder", "llm_config"):
        return {"model_type": part.model_type} | shrunk(part)
    noise = {option: 0.0 for option, value in options.items() if option.endswith(DRAWN) and value}
    return options | noise | {depth: 1 for depth in DEPTHS if options.get(depth)}


def shrunk(default: Any) -> dict[str, Any]:
    """The options that make a model small and let it draw nothing."""
    options = default.to_dict()
    present = {name for name in SIZES if hasattr_somewhere(default, name)}
    sizes = {name: SIZES[name] for name in present if options.get(name, 0) is not None}
    noise = {name: 0.0 for name, value in options.items() if name.endswith(DRAWN) and value}
    ids = {name: 0 for name in TOKEN_IDS if isinstance(options.get(name), int | list)}
    chosen = sizes | noise | ids | OPTIONS.get(default.model_type, {})
    return {name: value for name, value in chosen.items() if value is not None}


def hasattr_somewhere(config: Any, name: str) -> bool:
    """Whether a config has an option, perhaps another one for each layer."""
    try:
        return hasattr(config, name)
    except RuntimeError:  # layers differ in it
        return True


def tiny_model(model_type: str) -> Any:
    """A model whose norms aren't 1 and whose biases and sinks aren't 0, the same each time."""
    if model_type in SUPPORTED:
        return featured_model(model_type)
    if model_type in WHOLE:
        return seeing_model(model_type)
    is_text = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    torch.manual_seed(0)
    maker = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    model = maker.from_config(tiny_config(model_type), dtype=torch.float32)
    if not is_text:
        empty_other_parts(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.train()


def empty_other_parts(model: Any) -> None:
    """Take the weights out of what reads images or sound, which rows of text don't reach."""
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    used = {id(weight) for part in parts if part is not None for weight in part.parameters()}
    for weight in model.parameters():
        if id(weight) not in used:
            weight.data = weight.data.new_empty(0)


@contextmanager
def as_if_supported(model_type: str) -> Iterator[None]:
    """Within the context this family has a row in the table of support, and any kind of layer is
    covered."""
    row = FAMILIES.get(model_type, Family(model_type=model_type, name=model_type))
    table = {**FAMILIES, model_type: row}
    with ExitStack() as stack:
        for module in (checks, lm_head):
            stack.enter_context(mock.patch.object(module, "FAMILIES", table))
        if model_type not in FAMILIES:
            others = tuple(check for check in checks._CHECKS if check is not checks._layer_types)
            stack.enter_context(mock.patch.object(checks, "_CHECKS", others))
            stack.enter_context(mock.patch.object(checks, "refusal_of", return_value=None))
            # It would find attention in both directions in what reads images, too.
            stack.enter_context(mock.patch.object(patching, "check_modules"))
        yield


def rows() -> dict[str, Tensor]:
    """Two rows of text, without tokens that stand for images."""
    ids = torch.randint(1, IMAGE, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def stock_step(make: Callable[[], Any], dtype: torch.dtype) -> dict[str, Tensor]:
    model = make()
    if dtype == torch.float64:
        keep_float64(model)
    return backward(stock_loss(model, rows()), model)


def patched_steps(make: Callable[[], Any], config: LongContextConfig, dtype: torch.dtype) -> Steps:
    models = [make() for _ in range(config.sequence_degree)]
    for model in models:
        if dtype == torch.float64:
            keep_float64(model)

    def on_one_rank(transport: VirtualTransport) -> dict[str, Tensor]:
        model = models[transport.group_rank]
        handle = patch(model, config, group=virtual_group(transport, config))
        found = backward(model(**rows(), use_cache=False).loss, model)
        problem = None if handle.first_step is None else handle.first_step.backward_problem()
        if problem is not None:
            raise RuntimeError(problem)
        return found

    return run_virtual_ranks(config.sequence_degree, on_one_rank, timeout_s=LIMIT_S)


def errors(steps: Steps, wanted: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of the loss and of each gradient, as the mean over ranks; without those
    that are zero but for rounding."""
    total = sum(float(v.double().square().sum()) for n, v in wanted.items() if n != "loss") ** 0.5
    found = {}
    for name in dict.fromkeys(name for step in (wanted, *steps) for name in step):
        some = next(step[name] for step in (wanted, *steps) if name in step)
        expected = wanted.get(name, torch.zeros_like(some).double())
        mean = sum(step.get(name, torch.zeros_like(some)).double() for step in steps) / len(steps)
        if name == "loss" or float(expected.norm()) > ROUNDING * total:
            found[name] = relative_error(torch.as_tensor(mean), expected)
        elif float(torch.as_tensor(mean).norm()) > 1e-5 * total:
            found[name] = 1.0
    return found


def in_words(error: BaseException) -> str:
    """An error in one line, without the number of the rank that met it first."""
    if isinstance(error.__cause__, KeyError):  # its text is the key alone
        (key,) = error.__cause__.args
        if isinstance(key, int):  # an id, another one each time
            return "a module that the patch does not know computes attention"
        return f"a layer is called without {key!r}"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return TOO_LARGE
    if text.startswith("virtual rank "):
        text = text.split("failed: ", 1)[-1]
    return text if len(text) < 200 else f"{text[:200]}..."


def compared(make: Callable[[], Any], options: dict[str, Any]) -> dict[str, Any]:
    """What one way to cut rows gives: errors of both dtypes, or how it fails."""
    config = LongContextConfig(**options)
    try:
        exact = stock_step(make, torch.float64)
        double = errors(patched_steps(make, config, torch.float64), exact)
        if max(double.values()) > EXACT:
            gradients = max(value for name, value in double.items() if name != "loss")
            return {"differs": {"loss": short(double["loss"]), "gradients": short(gradients)}}
        single = errors(patched_steps(make, config, torch.float32), exact)
        own = errors([stock_step(make, torch.float32)], exact)
    except Exception as error:  # a survey goes on: what went wrong is its result
        return {"fails": in_words(error)}
    worst = {"float64": double, "float32": single, "stock float32": own}
    return {name: short(max(found.values())) for name, found in worst.items()}


def short(error: float) -> float:
    return float(f"{error:.1e}")


def survey(model_type: str) -> dict[str, Any]:
    """What each way to cut rows gives; what building the model gives, if that fails."""
    try:
        model = tiny_model(model_type)
        stock_step(lambda: copy.deepcopy(model), torch.float32)
    except Exception as error:
        return {"stock": {"fails": in_words(error)}}
    # Where the head does something to logits that only a row of the table would say.
    loss = {} if model_type in FAMILIES else {"loss": "logits"}
    with as_if_supported(str(model.config.model_type)):
        return {
            name: compared(lambda: copy.deepcopy(model), way | loss) for name, way in WAYS.items()
        }


def too_slow(*_: object) -> None:
    raise TimeoutError(TOO_LARGE)


def write(found: dict[str, Any]) -> None:
    """Put findings into the file, beside those of model types that were not asked for."""
    old = json.loads(FILE.read_text()) if FILE.exists() else {}
    same = old.get("transformers") == transformers.__version__
    families = (old["families"] if same else {}) | found
    order = {name: families[name] for name in known() if name in families}
    text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in order.items())
    version = json.dumps(transformers.__version__)
    FILE.write_text(f'{{"transformers": {version}, "families": {{\n{text}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model_types", nargs="*", help="default: all that transformers knows")
    parser.add_argument("--write", action="store_true", help=f"put findings into {FILE.name}")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, too_slow)
    for model_type in given.model_types or known():
        signal.alarm(LIMIT_S)
        try:
            found = survey(model_type)
        except TimeoutError as error:
            found = {"stock": {"fails": str(error)}}
        finally:
            signal.alarm(0)
        for way, verdict in found.items():
            print(f"{model_type:24} {way:8} {verdict}", flush=True)
        if given.write:
            write({model_type: found})


if __name__ == "__main__":
    main()
