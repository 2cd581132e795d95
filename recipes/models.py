"""The recipe's model and tokenizer: from the hub, a local folder or a bare config.json."""

import re
import shlex
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from accelerate.utils import set_seed
from transformers import (
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from longctx_patch.families.load_config import (
    is_bare_config,
    load_model_config,
    require_reachable,
    whole_config,
)
from longctx_patch.families.rope_facts import reach_problem
from longctx_patch.families.text_part import auto_class, auto_class_name
from longctx_patch.plugin import NeedsWholeReading, text_model, unread_model
from longctx_patch.plugin.stored_check import check_loaded, check_stored, freeze_as_made
from longctx_patch.recipes.data.conversations import check_template
from longctx_patch.rules.launched import flag

from .also_train import adapter_options, prepare_copies
from .run_record import PLAN_FILE, WEIGHT_FILES
from .settings import DtypeName, ModelSettings, Settings

BYTE_VOCABULARY = 258
MAMBA_TYPES = ("falcon_h1", "nemotron_h")
"""Model types in which peft refuses adapters around `conv1d` and `out_proj`."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_config(settings: Settings) -> PreTrainedConfig:
    """The model's config with RoPE that reaches `settings.target_length`."""
    config = load_model_config(settings.model)
    check_weights(settings.model)
    check_head(config)
    check_not_fp8(settings.model, config)
    check_text_part(settings)
    if settings.allow_beyond_reach and settings.rope == "none":
        if settings.context:
            raise ValueError(
                f"context={settings.context} with allow_beyond_reach: the one asks for RoPE that "
                "reaches it, the other leaves RoPE unchanged. Leave one out, or give --rope."
            )
        return config
    scaled = settings.scaled(config)
    if settings.eval_context_steps:
        problem = reach_problem(scaled, settings.context_lengths[-1])
        if problem and not settings.allow_beyond_reach:
            raise ValueError(f"eval_context_lengths: {problem}")
    return scaled


def weights_dtype(config: PreTrainedConfig, *, frozen: bool, on_cpu: bool = False) -> DtypeName:
    """The dtype that weights are loaded in where none was asked for.

    Frozen weights on a GPU keep the dtype that the model's config names. All others are float32,
    in which the optimizer holds trained weights, and in which the CPU computes.
    """
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    keeps = frozen and not on_cpu and name in ("bfloat16", "float16")
    return cast(DtypeName, name if keeps else "float32")


def with_dtype(settings: Settings, config: PreTrainedConfig, *, on_cpu: bool) -> Settings:
    """The settings with `dtype: auto` resolved; weights of 4 bits are computed with in bfloat16."""
    if settings.dtype != "auto":
        return settings
    found = weights_dtype(config, frozen=settings.uses_lora, on_cpu=on_cpu)
    return replace(settings, dtype="bfloat16" if settings.load_in_4bit else found)


def load_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, the one asked for, or bytes for a bare config without one."""
    source = settings.tokenizer or settings.model
    if is_bare_config(source):
        folder = Path(source).parent
        found = any((folder / name).is_file() for name in TOKENIZER_FILES)
        source = str(folder) if found else "bytes"
    tokenizer = byte_tokenizer() if source == "bytes" else _tokenizer_at(source)
    if settings.chat_template:
        tokenizer.chat_template = _template_in(Path(settings.chat_template))
    return tokenizer


def _template_in(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat_template: {file} can't be read ({error}). Give a file of Jinja, as published "
            "models have it in chat_template.jinja."
        ) from error
    check_template(text, str(file))
    return text


def _tokenizer_at(source: str) -> PreTrainedTokenizerBase:
    try:
        if not Path(source).expanduser().exists():
            require_reachable(source, "tokenizer_config.json", "tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # of broken files readers raise anything
        said = next(iter(str(error).splitlines()), type(error).__name__)
        if "custom code" in said:
            raise ValueError(
                f"the tokenizer at {source!r} needs Python code that comes with it, which is not "
                "run here. Give --tokenizer with one that transformers has a class for, such as a "
                "folder with tokenizer.json and tokenizer_config.json without auto_map."
            ) from error
        raise ValueError(
            f"no tokenizer found at {source!r} ({said}). Give --tokenizer "
            "with a folder or a name, or --tokenizer bytes for a model that reads bytes."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer at {source!r} has no eos token, which ends documents. Name the token "
            'that ends a text in its tokenizer_config.json ("eos_token": "</s>", for example), or '
            "give --tokenizer with one that has it."
        )
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_model(
    settings: ModelSettings,
    config: PreTrainedConfig,
    device: torch.device,
    *,
    sharded: bool = False,
    say: Callable[[str], object] = print,
) -> PreTrainedModel:
    """The model in `settings.dtype`; random weights follow torch's current seed. Collective.

    With `sharded`, weights are read when FSDP2 shards the model, each process its own rows, unless
    the checkpoint can't be read so, which `say` is told. Otherwise the model is on the CPU, but
    weights of 4 bits are on `device`, where they are quantised while loading, and without FSDP so
    are random ones, which are drawn on the CPU: the seed gives the same ones on any machine.
    """
    dtype = getattr(torch, settings.dtype)
    reads_images = not is_bare_config(settings.model) and whole_config(settings.model) is not None
    if reads_images:
        say(f"{settings.model}: its text model is trained, and what reads images is left out")
    if sharded:
        try:
            found = unread_model(
                settings.model,
                config=config,
                dtype=dtype,
                allow_weights=settings.allow_weights,
            )
            return cast(PreTrainedModel, found)
        except NeedsWholeReading as reason:
            say(f"each process reads all weights: {reason}")
    if is_bare_config(settings.model):
        drawn = auto_class(config).from_config(config, dtype=dtype)
        stays = settings.uses_lora or flag("ACCELERATE_USE_FSDP")
        return cast(PreTrainedModel, drawn if stays else drawn.to(device))
    options: dict[str, Any] = {"config": config, "dtype": dtype, "trust_remote_code": False}
    if settings.load_in_4bit:
        options |= {"quantization_config": four_bits(dtype), "device_map": {"": device}}
    check_stored(settings.model, config, settings.allow_weights)
    try:
        if reads_images:
            allowed = settings.allow_weights
            found = text_model(settings.model, config=config, dtype=dtype, allow_weights=allowed)
            return cast(PreTrainedModel, found)
        model, info = auto_class(config).from_pretrained(
            settings.model, **options, output_loading_info=True
        )
    except (OSError, UnpicklingError) as error:
        raise ValueError(
            f"model {settings.model!r}: its weights can't be read ({error})."
        ) from error
    check_loaded(settings.model, info, settings.allow_weights)
    if not settings.load_in_4bit:
        freeze_as_made(model)
    return cast(PreTrainedModel, model)


def reads_shards(settings: ModelSettings) -> bool:
    """Says whether each process reads its own rows of the weights: under FSDP2, unless Accelerate
    sends them from one process or the settings say no."""
    is_sent = flag("FSDP_CPU_RAM_EFFICIENT_LOADING")
    return settings.load_sharded and flag("ACCELERATE_USE_FSDP") and not is_sent


def four_bits(dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4 with quantised scales, computed in `dtype` (QLoRA, Dettmers et al. 2023)."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def check_4bit(settings: Settings, *, fsdp: bool) -> None:
    """Refuse weights of 4 bits that can't be made, and ways to run them that are not tested."""
    if not settings.load_in_4bit:
        return
    if is_bare_config(settings.model):
        raise ValueError(
            f"load_in_4bit with the bare config {settings.model}: random weights are made in "
            "16 bits or more. Give a folder or a name with weights."
        )
    if fsdp:
        raise ValueError(
            "load_in_4bit under FSDP2 is not covered. Let each process hold the model, which takes "
            "a quarter of the memory: distributed_type: MULTI_GPU (one process: NO) in the YAML; "
            "`longctx patch --load-in-4bit` writes that."
        )
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            'load_in_4bit needs bitsandbytes: pip install "bitsandbytes>=0.48" '
            "(or longctx-patch[4bit])."
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Refuse a tokenizer whose ids the model's embedding does not have, also where it has gaps."""
    most = max([len(tokenizer) - 1, *tokenizer.get_vocab().values()])
    if most >= config.vocab_size:
        has = f"{len(tokenizer)} tokens"
        has = has if most == len(tokenizer) - 1 else f"{has}, one with the id {most}"
        raise ValueError(
            f"the tokenizer has {has}, the model vocab_size={config.vocab_size}. "
            "Put the model's own tokenizer beside its config.json (without one, bytes are read: "
            f"vocab_size {BYTE_VOCABULARY} or more), or name it in the setting `tokenizer`."
        )


def add_lora(
    model: PreTrainedModel, settings: Settings, seed: int, say: Callable[[str], object] = print
) -> Any:
    """Wrap `model` into a peft model with a fresh adapter, and `say` what it leaves out.

    The adapter is that of the seed, however many random numbers loading has drawn: it draws
    others where each process reads its own rows. Raises ValueError for a target that matches no
    module, or no weight, of the model.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    set_seed(seed)
    _check_parameters(model, settings.lora_target_parameters)
    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    everything = settings.lora_targets == ["all-linear"]
    unknown = [name for name in settings.lora_targets if name.rsplit(".", 1)[-1] not in linear]
    if unknown and not everything:
        raise ValueError(
            f"lora_targets {', '.join(unknown)}: the model has no such linear layers. "
            f"It has {', '.join(sorted(linear))}; all-linear takes all but the last."
        )
    head, excluded = model.get_output_embeddings(), _without_adapter(model)
    adapter = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear" if everything else settings.lora_targets,
        target_parameters=settings.lora_target_parameters or None,
        exclude_modules=(everything and sorted(excluded)) or None,
        **adapter_options(model, settings.also_train, settings.lora_targets),
    )
    try:
        adapted = get_peft_model(model, adapter)
    except (TypeError, ValueError) as error:
        if not (named := settings.lora_target_parameters):
            raise
        raise ValueError(
            f"lora_target_parameters {', '.join(named)}: PEFT refuses ({error}). Leave out what "
            "lora_targets or also_train has already, and what has neither 2 nor 3 dimensions."
        ) from error
    prepare_copies(adapted, ties=adapter.ensure_weight_tying)
    if everything and (left := _left_out(adapted, head, excluded)):
        say(
            f"The adapter leaves {sum(left.values()):,} weights frozen that PEFT's all-linear does "
            f"not reach. --lora-target-parameters {' '.join(left)} adapts them too."
        )
    return adapted


def _check_parameters(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Refuse names that PEFT would find no weight for, or would only warn of."""
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_parameters()):
            stacked = {_within_layer(name) for name, _ in _stacked(model)}
            raise ValueError(
                f"lora_target_parameters {target}: no weight's name ends so. Those that all "
                f"experts have in one tensor: {', '.join(sorted(stacked)) or 'none'}."
            )


def _within_layer(name: str) -> str:
    """The end of a weight's name that it has in every layer, in a model without an adapter."""
    return re.split(r"\.\d+\.", name.replace(".base_layer", ""))[-1]


def _stacked(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields (name, weight) of what holds a matrix of each expert."""
    for name, module in model.named_modules():
        for end, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3 and not isinstance(module, torch.nn.Conv1d):
                yield f"{name}.{end}", weight


def _left_out(adapted: Any, head: Any, excluded: Container[str]) -> dict[str, int]:
    """Returns how many weights of experts and linear layers have no adapter, by the ends of their
    names; the head's and those of modules that are `excluded` by name are not looked at."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    has_adapter = {
        id(each.get_param() if isinstance(each, ParamWrapper) else each.get_base_layer().weight)
        for each in layers
    }
    stacked = [(name, weight, weight.numel()) for name, weight in _stacked(adapted)]
    linear = [
        (f"{name}.weight", module.weight, module.in_features * module.out_features)  # of 4 bits too
        for name, module in adapted.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    left: dict[str, int] = {}
    for name, weight, number in (*stacked, *linear):
        is_frozen = not weight.requires_grad and id(weight) not in has_adapter
        if is_frozen and name.rsplit(".", 2)[-2] not in excluded:
            left[_within_layer(name)] = left.get(_within_layer(name), 0) + number
    return left


def _without_adapter(model: PreTrainedModel) -> set[str]:
    """Names of linear layers that can't have an adapter: routers that return more than a product
    (Llama 4, Phi-3.5-MoE), and what peft refuses where a Mamba kernel takes the weights."""
    names = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and type(module).__module__.startswith("transformers.models.")
        and type(module).forward is not torch.nn.Linear.forward
    }
    return names | {"conv1d", "out_proj"} if model.config.model_type in MAMBA_TYPES else names


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, then `<eos>` and `<pad>`: 258 tokens, nothing to download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The library writes each byte as a printable character; its alphabet comes in no fixed order.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def check_text_part(settings: ModelSettings) -> None:
    """Refuse an adapter over the text model of a checkpoint that reads images too: whatever loads
    the adapter later would not find its base."""
    if not (settings.uses_lora or settings.load_in_4bit) or is_bare_config(settings.model):
        return
    whole = whole_config(settings.model)
    if whole is not None:
        command, folder = text_model_command(settings.model)
        raise ValueError(
            f"model {settings.model!r} is a {whole.model_type}, which reads images too, and only "
            "its text model is trained: an adapter needs that as its base. Write it once, "
            f"`{command}`, and give {folder}; or train all weights (--full)."
        )


def text_model_command(model: str) -> tuple[str, str]:
    """(the command that writes the text model of a checkpoint that reads images, its folder)."""
    folder = f"{Path(model).name}-text"
    return shlex.join(["python", "-m", "longctx_patch.recipes.text_model", model, folder]), folder


def base_of_adapter(model: str) -> tuple[str, str]:
    """(what stands before a command that trains an adapter over `model`, the model it names): of a
    checkpoint that reads images the text model is written first."""
    model = weights_or_config(model)
    if is_bare_config(model) or whole_config(model) is None:
        return "", model
    command, folder = text_model_command(model)
    return f"{command} && ", folder


def check_head(config: PreTrainedConfig) -> None:
    """Refuse a checkpoint without a language-model head, which would get random weights."""
    names = config.architectures or []
    if names and not any("CausalLM" in name or "ConditionalGen" in name for name in names):
        raise ValueError(
            f"architectures: {', '.join(names)} in the model's config.json: it has no head for "
            "language modelling, so that one of random weights would be trained. Take a checkpoint "
            "of a ...ForCausalLM."
        )


def weights_or_config(model: str) -> str:
    """The model, or the config.json of a local folder without weights, which makes random ones."""
    folder = Path(model).expanduser()
    found = (file for pattern in WEIGHT_FILES for file in folder.glob(pattern))
    is_empty = folder.is_dir() and not any(file.is_file() for file in found)
    return str(folder / "config.json") if is_empty else model


def check_weights(model: str) -> None:
    """Refuse a local folder without weights, or with those of an adapter alone; those of a hub name
    are found when it is loaded."""
    folder = Path(model).expanduser()
    if (folder / "adapter_config.json").is_file():
        command = shlex.join(["longctx", "merge", model, "--out", f"{folder.name}-merged"])
        raise ValueError(
            f"model folder {model!r} has an adapter, which is no model to train: `{command}` "
            "writes one with it, to be given in its place."
        )
    if (trained := folder / "training" / "final").is_dir() and (folder / PLAN_FILE).is_file():
        raise ValueError(
            f"model folder {model!r} is a run folder, in which a model was trained: give that, "
            f"{str(trained)!r}."
        )
    if (file := weights_or_config(model)) != model:
        path = shlex.quote(file)
        raise ValueError(
            f"model folder {model!r} has no weights ({', '.join(WEIGHT_FILES)}). To start from "
            f"random weights, give the file itself: `longctx patch {path} ...`, or in the recipe "
            f"`--model {path}`."
        )


FP8_METHODS = frozenset({"fp8", "fbgemm_fp8"})


def check_not_fp8(model: str, config: Any) -> None:
    """Refuse FP8 weights, and say how they are written in bfloat16.

    No gradients pass through their kernels on GPUs, and what was trained would be saved beside a
    config that calls it FP8.

    Args:
        model: hub name or local folder.
        config: of the model, or of its text model.
    """
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method not in FP8_METHODS:
        return
    is_whole = not is_bare_config(model) and whole_config(model) is not None
    kind = "AutoModelForImageTextToText" if is_whole else auto_class_name(config)
    name = f"{Path(model).name}-bf16"
    raise ValueError(
        f"model {model!r} has weights in 8-bit floating point (quantization_config with "
        f"quant_method {method!r} in its config.json), which can be served but not trained. Take "
        "its checkpoint in bfloat16, or write one and put the tokenizer beside it: "
        f"{kind}.from_pretrained({model!r}, dtype=torch.bfloat16, quantization_config="
        f"transformers.FineGrainedFP8Config(dequantize=True)).save_pretrained({name!r})."
    )
