"""Models whose weights are read when they are sharded, each rank its own rows.

    model = unread_model("meta-llama/Llama-3.1-70B")    # reads the config and the files' headers
    model = get_peft_model(model, lora)                 # as with any model
    handle = patch(model, config)
    optimizer = AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)   # shards (FSDP2), then reads

Until then each weight is a single NaN, seen at every place: it takes no memory, and whatever
computes with it shows. `load_sharded` is for loops that call torch's `fully_shard` themselves.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import GenerationConfig
from transformers.utils.logging import tqdm

from longctx_patch.families.load_config import is_bare_config, load_model_config, whole_config
from longctx_patch.families.stored_tensors import (
    READERS,
    NeedsWholeReading,
    read_headers,
    weight_files,
)
from longctx_patch.families.stored_weights import (
    StoredWeight,
    differ_though_tied,
    stored_weights,
)
from longctx_patch.families.text_part import auto_class, text_weights
from longctx_patch.plugin.stored_check import model_without_memory
from longctx_patch.rules.together import refuse_together

_ATTRIBUTE = "_longctx_unread"
Slots = dict[str, tuple[nn.Module, str]]
"""Each weight's module and its name there, which wrappers around the module don't change."""
WRITTEN_AFTER_READING = MappingProxyType({"youtu": "zeros to the row of its padding token"})
"""The changes that transformers makes to weights that it has read, by model type."""


@dataclass(frozen=True)
class _Unread:
    """The weights of a model that are still to be read, and the places that they go to."""

    slots: Slots
    dtypes: dict[str, torch.dtype]
    """The dtype that a weight is read in, before FSDP2 changes it to that of training."""
    stored: dict[str, StoredWeight]
    drawn: dict[str, Tensor]
    """Random weights, on rank 0 only."""


def unread_model(
    model: str,
    *,
    config: Any = None,
    dtype: torch.dtype | None = None,
    allow_weights: Sequence[str] = (),
) -> Any:
    """The causal language model that `AutoModelForCausalLM.from_pretrained` makes, not yet read; of
    a checkpoint that reads images too, the one that `text_model` makes.

    Collective; call it after the process group was set up. Weights are read from safetensors when
    FSDP2 shards the model: in `prepare` of an Accelerator from `make_accelerator`, in a trainer of
    this package, or in `load_sharded`. Then each weight and buffer is bitwise what
    `from_pretrained` gives, in the copies that PEFT trains as well (`modules_to_save`). Parameters
    that are added before, such as adapters, become rank 0's.

    Args:
        model: a folder or hub name; or a config.json, for random weights: those that one process
            draws with rank 0's seed.
        config: in place of the one published with the model.
        dtype: of the weights; default: the one that the config names, else the files'.
        allow_weights: names, or patterns such as `*.bias`, of weights in the files that the model
            does not have.

    Raises:
        ValueError: on all ranks, with file and weight: one that is missing, unexpected or of
            another shape, a file that was cut short.
        NeedsWholeReading: a ValueError on all ranks, for what `from_pretrained` reads but can't be
            read by rows: weights not in safetensors, quantised, or converted while loading.

    Example:
        >>> model = unread_model("Qwen/Qwen3-8B", dtype=torch.bfloat16)
    """
    made, problem, whole = None, [], []
    try:
        config = copy.deepcopy(load_model_config(model) if config is None else config)
        if is_bare_config(model):
            made = _drawn(config, dtype)
        else:
            made = _stored(model, config, dtype, allow_weights)
    except NeedsWholeReading as error:
        whole = [str(error)]
    except ValueError as error:
        problem = [str(error)]
    _wait_for_all()
    refuse_together(problem)
    refuse_together(whole, NeedsWholeReading)
    return made


def is_unread(model: nn.Module) -> bool:
    """Says whether `model`, or the one that it wraps, is one of `unread_model` without weights."""
    return any(_ATTRIBUTE in vars(module) for module in model.modules())


def load_sharded(
    model: nn.Module,
    shard: Callable[[nn.Module], Any],
    device: torch.device,
    *,
    on_host: bool = False,
) -> None:
    """Shard a model of `unread_model` and read each rank's rows. Collective over the world.

    Args:
        shard: calls torch's `fully_shard` on the model and its layers, in place.
        device: of this rank; weights are there afterwards.
        on_host: weights are on the CPU, as with FSDP2's `CPUOffloadPolicy`.

    Raises:
        ValueError: on all ranks: a weight can't be read, or another one was made from it before.

    Example:
        >>> model = unread_model("Qwen/Qwen3-8B")
        >>> load_sharded(model, shard_layers_and_model, torch.device("cuda", local_rank))
        >>> optimizer = AdamW(model.parameters())
    """
    (holder,) = (module for module in model.modules() if _ATTRIBUTE in vars(module))
    unread: _Unread = getattr(holder, _ATTRIBUTE)
    alive = {id(module) for module in model.modules()}
    slots = {name: slot for name, slot in unread.slots.items() if id(slot[0]) in alive}
    copies, originals = _copies(model)
    promised = {id(getattr(*slot)) for slot in (*slots.values(), *copies.values())}
    others = {n: p for n, p in model.named_parameters() if id(p) not in promised}
    refuse_together(_made_early(others, slots))
    for parameter in others.values():
        _make_equal(parameter, device)
    for found in (slots, copies):
        _replace(found, lambda parameter: torch.empty_like(parameter, device="meta"))
    shard(model)
    where = torch.device("cpu") if on_host else device
    if unread.stored:
        _read(unread, slots, where)
    else:
        _scatter(unread, slots, device, where)
    for names in _by_weight(copies):
        read, dtype = getattr(*originals[names[0]]).detach(), getattr(*copies[names[0]]).dtype
        local = read.to_local() if isinstance(read, DTensor) else read
        _put(names, copies, local.to(dtype, copy=True))
    delattr(holder, _ATTRIBUTE)


def _copies(model: nn.Module) -> tuple[Slots, Slots]:
    """Weights of unread modules that PEFT has copied to train them, and those that they copy."""
    copies: Slots = {}
    originals: Slots = {}
    for prefix, wrapper in model.named_modules():
        copied = getattr(wrapper, "modules_to_save", None)
        for adapter, module in copied.items() if isinstance(copied, nn.ModuleDict) else ():
            for name, weight in module.named_parameters():
                inner, _, leaf = name.rpartition(".")
                if weight[(0,) * weight.dim()].isnan():
                    key = f"{prefix}.{adapter}.{name}"
                    copies[key] = (module.get_submodule(inner), leaf)
                    originals[key] = (wrapper.original_module.get_submodule(inner), leaf)
    return copies, originals


def _stored(name: str, config: Any, dtype: torch.dtype | None, allowed: Sequence[str]) -> Any:
    """A model whose weights are in files."""
    if getattr(config, "quantization_config", None) is not None:
        raise NeedsWholeReading(
            f"model {name!r} has quantised weights, which are not read by rows. Load it with "
            "AutoModelForCausalLM.from_pretrained, without FSDP2."
        )
    folder = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    files = weight_files(folder)
    if not files:
        raise NeedsWholeReading(
            f"model {name!r} has no weights in safetensors. Load it with AutoModelForCausalLM."
            "from_pretrained and write it anew with save_pretrained."
        )
    if (written := WRITTEN_AFTER_READING.get(config.model_type)) is not None:
        raise NeedsWholeReading(
            f"model {name!r} is a {config.model_type}: transformers writes {written} after "
            "reading. Load it with AutoModelForCausalLM.from_pretrained."
        )
    config.name_or_path = folder
    tensors = read_headers(files)
    floats = (t.dtype for t in tensors.values() if t.dtype.is_floating_point)
    dtype = dtype or config.dtype or next(floats, torch.float32)
    model = model_without_memory(config, dtype)
    if plan := model._get_dtype_plan(dtype):
        raise NeedsWholeReading(
            f"{type(model).__name__} keeps {', '.join(plan)} in float32, not in {dtype}: load it "
            "in float32, or with AutoModelForCausalLM.from_pretrained."
        )
    if (whole := whole_config(folder)) is None:
        stored = stored_weights(model, tensors, allowed)
    else:
        stored = stored_weights(model_without_memory(whole, dtype), tensors, allowed)
        stored = text_weights(stored)
    _remember(model, stored=stored)
    with suppress(OSError):  # then it follows from the config
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _drawn(config: Any, dtype: torch.dtype | None) -> Any:
    """A model of random weights, which rank 0 draws on the CPU now."""
    dtype = dtype or config.dtype or torch.float32
    if not _distributed() or not dist.get_rank():
        model = auto_class(config).from_config(config, dtype=dtype)
        named = model.named_parameters(remove_duplicate=False)
        _remember(model, drawn={name: parameter.data for name, parameter in named})
    else:
        model = model_without_memory(config, dtype)
        _remember(model)
    return model


def _remember(
    model: Any,
    stored: dict[str, StoredWeight] | None = None,
    drawn: dict[str, Tensor] | None = None,
) -> None:
    """Note where the model's weights come from, and make each a NaN."""
    slots: Slots = {}
    for prefix, module in model.named_modules():
        names = [*module._parameters, *(module._buffers if stored else ())]
        names = [n for n in names if n not in module._non_persistent_buffers_set]
        slots |= {f"{prefix}.{name}".lstrip("."): (module, name) for name in names}
    slots = {name: slot for name, slot in slots.items() if getattr(*slot) is not None}
    dtypes = {name: getattr(*slot).dtype for name, slot in slots.items()}
    setattr(model, _ATTRIBUTE, _Unread(slots, dtypes, stored or {}, drawn or {}))
    _replace(slots, lambda weight: torch.full((1,) * weight.dim(), torch.nan).to(weight.dtype))


def _replace(slots: Slots, make: Callable[[Tensor], Tensor]) -> None:
    """Put parameters of the same shape in place; what was tied stays tied."""
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for module, attribute in slots.values():
        old = getattr(module, attribute)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(make(old).expand(old.shape), requires_grad=old.requires_grad)
            setattr(module, attribute, made.setdefault(id(old), (old, new))[1])


def _made_early(others: dict[str, nn.Parameter], slots: Slots) -> Iterator[str]:
    """Names what was computed from weights that had not been read, or written to them."""
    for name, parameter in others.items():
        if parameter.isnan().any():
            yield (
                f"{name} was made from weights that are not read yet (a copy, as by "
                "resize_token_embeddings, or an initialisation by their "
                "values). Load this model with from_pretrained, or make it without that."
            )
    for name, (module, attribute) in slots.items():
        weight = getattr(module, attribute)
        if isinstance(weight, nn.Parameter) and not weight[(0,) * weight.dim()].isnan():
            yield (
                f"{name} was written to before it is read, and would be read over. Write to it "
                "after prepare, or load this model with from_pretrained."
            )


def _make_equal(parameter: nn.Parameter, device: torch.device) -> None:
    """Copies rank 0's values to all ranks."""
    if _distributed():
        values = parameter.detach().to(device, copy=True)
        dist.broadcast(values, src=0)
        parameter.data.copy_(values)


def _read(unread: _Unread, slots: Slots, where: torch.device) -> None:
    problem = []
    groups = _by_weight(slots)
    try:
        with ThreadPoolExecutor(READERS) as readers:
            jobs = ([n for n in names if n in unread.stored] for names in groups)
            read = readers.map(lambda names: _rows(unread, names, slots, where), jobs)
            pairs = zip(groups, read, strict=True)
            # The bar that from_pretrained has.
            for names, local in tqdm(pairs, total=len(groups), desc="Loading weights"):
                _put(names, slots, local)
    except ValueError as error:
        problem = [str(error)]
    refuse_together(problem)


def _rows(unread: _Unread, names: list[str], slots: Slots, where: torch.device) -> Tensor:
    """This rank's part of a weight, which tied weights have once for each of `names`."""
    weight = getattr(*slots[names[0]])
    shape, offsets = tuple(weight.shape), (0,) * weight.dim()
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        shape, offsets = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    start, found = offsets[0] if shape else 0, []
    for name in names:
        local = torch.empty((*shape[:1], *weight.shape[1:]), dtype=weight.dtype, device=where)
        # Rounded as from_pretrained would, and only then made what FSDP2 trains.
        unread.stored[name].read_into(local, start, unread.dtypes[name])
        found.append(local)
    local = found[0]
    if any(not torch.equal(local, other) for other in found[1:]):
        raise differ_though_tied(unread.stored[names[0]].file, names)
    for dim in range(1, len(shape)):  # FSDP2 cuts the first dimension unless told otherwise
        local = local.narrow(dim, offsets[dim], shape[dim])
    return local.contiguous()


def _scatter(
    unread: _Unread,
    slots: Slots,
    device: torch.device,
    where: torch.device,
) -> None:
    """Give each rank its part of rank 0's random weights, one after the other."""
    for names in _by_weight(slots):
        weight, dtype = getattr(*slots[names[0]]), unread.dtypes[names[0]]
        whole = torch.empty(weight.shape, dtype=dtype, device=device)
        if unread.drawn:
            whole, *_ = [unread.drawn.pop(name) for name in names]  # each is freed once it is sent
            whole = whole.to(device)
        if isinstance(weight, DTensor):
            mesh, placements = weight.device_mesh, weight.placements
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=0).to_local()
        elif _distributed():
            dist.broadcast(whole, src=0)
        _put(names, slots, whole.to(where, weight.dtype))


def _by_weight(slots: Slots) -> list[list[str]]:
    """Names, those of a tied weight together."""
    groups: dict[int, list[str]] = {}
    for name, slot in slots.items():
        groups.setdefault(id(getattr(*slot)), []).append(name)
    return list(groups.values())


def _put(names: list[str], slots: Slots, local: Tensor) -> None:
    """Set this rank's part of a weight."""
    weight = getattr(*slots[names[0]])
    if not isinstance(weight, nn.Parameter):
        weight.copy_(local)
        return
    if isinstance(weight, DTensor):
        shape, stride = weight.shape, weight.stride()
        mesh, placements = weight.device_mesh, weight.placements
        local = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )
    read = nn.Parameter(local, requires_grad=weight.requires_grad)
    for name in names:
        setattr(*slots[name], read)


def _wait_for_all() -> None:
    """Wait until rank 0 has drawn random weights, longer than other collectives may take."""
    if _distributed():
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        dist.barrier(group)
        dist.destroy_process_group(group)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
