"""`make_accelerator`: an Accelerator whose world is what the LongContextConfig needs, or an error.

Everything is checked from what the launcher exported, before a process group starts: a world of
the wrong size would otherwise train without sequence parallelism and without an error.
"""

import gc
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate import accelerator as accelerate_module
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import FSDPModule

from longctx_patch.config import LongContextConfig, require_config
from longctx_patch.memory.allocator import let_segments_grow
from longctx_patch.plugin.gradients import (
    exact_mixed_precision,
    keep_gradients_sharded,
    settle_when_prepared,
)
from longctx_patch.plugin.parallelism import SequenceParallelismConfig, data_parallel_sizes
from longctx_patch.plugin.start import choose_gloo_interface, wait_for_siblings
from longctx_patch.plugin.unread import is_unread, load_sharded
from longctx_patch.rules.launched import announced_processes, flag
from longctx_patch.rules.together import of_all_ranks
from longctx_patch.rules.world import require_whole_groups


def make_accelerator(
    config: LongContextConfig,
    *,
    dp_replicate_size: int | None = None,
    dp_shard_size: int | None = None,
    **accelerator_kwargs: Any,
) -> Accelerator:
    """The Accelerator for `config`, over all the processes that the launcher started.

    Call it on every process, before any other Accelerator. Without sizes, the ranks beside the
    sequence axis shard parameters under FSDP2 and hold copies of the model otherwise. Batches are
    never dispatched from rank 0, since the ranks of a sequence group would get different rows. A
    prepared DataLoader gives the same rows to all ranks of a sequence group and other rows to each
    group; `longctx_patch.world_place(config)` says which group this process is in. Where there is
    no NVIDIA GPU the processes talk through gloo on the CPU.

    `gradient_accumulation_steps` is for whole rows; batches of `SequenceShardCollator` are refused
    under it. A prepared scheduler steps as on one process: once an optimizer step, or, with
    `step_scheduler_with_optimizer=False`, in each `scheduler.step()`. Accelerate alone would step
    it once per process, and end a schedule too early.

    Under FSDP2 with mixed precision, gradients are reduced in float32, and outputs, such as the
    loss, keep their dtype; Accelerate's default would round both to the low precision. Give your
    own `fsdp_plugin` to decide otherwise. Within `accelerator.accumulate` gradients are reduced
    after every forward, so that they stay sharded; give your own `gradient_accumulation_plugin` to
    reduce them after the last one only. torch's CUDA allocator is set to segments that grow,
    unless `PYTORCH_ALLOC_CONF` says otherwise. Between machines, gloo is given the interface that
    leads to the first one where it would take the loopback, unless `GLOO_SOCKET_IFNAME` names one.

    Args:
        config: degrees of sequence parallelism.
        dp_replicate_size: ranks that hold copies of the model (HSDP, DDP).
        dp_shard_size: ranks beside the sequence axis that shard the model (FSDP2).
        accelerator_kwargs: passed on to `Accelerator`.

    Raises:
        ValueError: the world, the launch settings or the arguments do not fit `config`.
        TypeError: `config` is none.

    Example:
        >>> accelerator = make_accelerator(LongContextConfig(ulysses_degree=2, ring_degree=2))
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
    require_config(config)
    _refuse_other_engines(accelerator_kwargs)
    num_processes = _num_processes()
    require_whole_groups(
        config.degrees_in_words,
        config.sequence_degree,
        num_processes,
    )
    cpu = bool(accelerator_kwargs.pop("cpu", False)) or not _gpu_wanted()
    fsdp2 = _uses_fsdp2(accelerator_kwargs.get("fsdp_plugin"), cpu)
    sizes = launched_sizes(config, dp_replicate_size, dp_shard_size)
    parallelism = _parallelism(config, num_processes, fsdp2, *sizes)
    parallelism.check_world(num_processes, fsdp2)
    accelerator_kwargs["dataloader_config"] = _same_batches(accelerator_kwargs)
    if fsdp2 and accelerator_kwargs.get("fsdp_plugin") is None:
        accelerator_kwargs["fsdp_plugin"] = _exact_fsdp_plugin(accelerator_kwargs)
    if not cpu:
        let_segments_grow()
    choose_gloo_interface()
    wait_for_siblings()
    accelerator = _Accelerator(cpu=cpu, parallelism_config=parallelism, **accelerator_kwargs)
    _check_ours(accelerator, parallelism)
    require_one_precision(accelerator)
    read_when_sharded(accelerator)
    settle_when_prepared(accelerator)
    if fsdp2 and accelerator_kwargs.get("gradient_accumulation_plugin") is None:
        keep_gradients_sharded(accelerator)
    _share_cores(accelerator)
    return accelerator


def require_one_precision(accelerator: Accelerator) -> None:
    """Raise ValueError on all ranks unless all compute in the same precision: else messages have
    other sizes than the ranks that get them expect. Collective over the world."""
    found = of_all_ranks(str(accelerator.mixed_precision))
    if len(set(found)) > 1:
        raise ValueError(
            f"mixed_precision is {', '.join(found)} on ranks 0 to {len(found) - 1}. Give all "
            "processes the same: --mixed_precision of `accelerate launch`, or "
            "ACCELERATE_MIXED_PRECISION on every machine."
        )


def read_when_sharded(accelerator: Accelerator) -> None:
    """Make `accelerator.prepare` read the weights of an `unread_model`, or refuse it.

    They are read between Accelerate's own steps: it notes which parameters the optimizer has,
    shards the model, and gives the optimizer the parameters that the model has then. Models that
    are read have their dtypes checked.
    """
    prepare = accelerator.prepare

    def prepare_and_read(*args: Any, **kwargs: Any) -> Any:
        models = [each for each in args if isinstance(each, torch.nn.Module)]
        if not any(map(is_unread, models)):
            found = prepare(*args, **kwargs)
            for model in models:  # FSDP2 shards it in place
                _require_one_dtype(model)
            return found
        if not accelerator.is_fsdp2:
            raise ValueError(
                "the model is one of unread_model, whose weights are read when FSDP2 shards it, "
                "which is not on. Put distributed_type: FSDP and fsdp_version: 2 in the YAML, or "
                "load the model with from_pretrained."
            )
        if accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            raise ValueError(
                "fsdp_cpu_ram_efficient_loading: true with a model of unread_model: rank 0 would "
                "send weights that it does not have. Put false there; each rank reads its own."
            )
        shard = accelerate_module.fsdp2_prepare_model
        accelerate_module.fsdp2_prepare_model = _shard_and_read
        try:
            return prepare(*args, **kwargs)
        finally:
            accelerate_module.fsdp2_prepare_model = shard

    accelerator.prepare = prepare_and_read


def _shard_and_read(accelerator: Accelerator, model: Any) -> Any:
    shard = partial(fsdp2_prepare_model, accelerator)
    load_sharded(model, shard, accelerator.device, on_host=states_on_host(accelerator))
    return model


def _require_one_dtype(model: torch.nn.Module) -> None:
    """Raise ValueError for trained weights of several dtypes that FSDP2 shards together. torch says
    so in the first forward, without the names and what to do."""
    groups: list[Any] = [each for each in model.modules() if isinstance(each, FSDPModule)]
    seen = set[torch.nn.Parameter]()
    for group in reversed(groups):  # those within a group come before it
        names: dict[torch.dtype, str] = {}
        for name, weight in group.named_parameters():
            if weight.requires_grad and weight not in seen:
                names.setdefault(weight.dtype, name)
        if len(names) > 1:
            found = ", ".join(f"{name} in {dtype}" for dtype, name in names.items())
            raise ValueError(
                f"weights of {type(group).__name__} differ in dtype ({found}), and FSDP2 shards "
                "those that it trains together in one. Load the model with dtype=torch.float32, "
                "give mixed_precision bf16, under which trained weights are float32, or train an "
                "adapter."
            )
        seen.update(group.parameters())


def shard_frozen(accelerator: Accelerator, model: Any) -> None:
    """Shard a model that is never trained under FSDP2, by layers as `prepare` shards a trained one,
    and read its weights if it is one of `unread_model`. They keep their dtype. Collective."""
    model.requires_grad_(False)
    if is_unread(model):
        _shard_and_read(accelerator, model)
    else:
        fsdp2_prepare_model(accelerator, model)


def states_on_host(accelerator: Accelerator) -> bool:
    """Says whether FSDP2 keeps parameters, gradients and the optimizer in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    return plugin is not None and isinstance(plugin.cpu_offload, CPUOffloadPolicy)


class _Accelerator(Accelerator):
    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that steps once an optimizer step, whatever the number of processes:
        Accelerate steps it once per process unless the loader splits batches over them."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def end_training(self) -> None:
        close_accelerator(self)


def close_accelerator(accelerator: Accelerator) -> None:
    """End training and the trackers on all processes together. Collective; call it last.

    `accelerator.end_training()` of an accelerator from `make_accelerator` does the same; the second
    of two such calls does nothing.

    Without this a gloo process sometimes aborts after its work is done ("terminate called without
    an active exception") and the launcher reports failure: the thread that ran the last collective
    needs Python to free its tensors while the interpreter ends. So a barrier, which has no tensors,
    comes last, and the mesh, which keeps process groups alive, is dropped: no such thread is left.
    """
    has_group = accelerator.num_processes == 1 or torch.distributed.is_initialized()
    if has_group:
        accelerator.wait_for_everyone()
        Accelerator.end_training(accelerator)
    if accelerator.parallelism_config is not None:
        accelerator.parallelism_config.device_mesh = None
    accelerator.state.device_mesh = None
    gc.collect()


def _refuse_other_engines(kwargs: dict[str, Any]) -> None:
    if kwargs.get("parallelism_config") is not None:
        raise ValueError(
            "parallelism_config was given: make_accelerator builds it from the LongContextConfig. "
            "Pass dp_replicate_size and dp_shard_size instead."
        )
    for engine in ("DEEPSPEED", "MEGATRON_LM"):
        if flag(f"ACCELERATE_USE_{engine}") or kwargs.get(f"{engine.lower()}_plugin") is not None:
            raise ValueError(
                f"{engine} is on: it brings its own attention and process groups. Use "
                "distributed_type: FSDP (fsdp_version: 2) or MULTI_GPU in the YAML."
            )


def _num_processes() -> int:
    """Processes that the launcher announced. Raises where Accelerate would see another number."""
    announced = announced_processes()
    seen = PartialState._shared_state.get("num_processes", announced)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        seen = torch.distributed.get_world_size()
    if seen != announced:
        raise ValueError(
            f"the launcher announced {announced} processes (WORLD_SIZE), but the state set up "
            f"before make_accelerator has {seen}. Call make_accelerator before anything else of "
            "Accelerate (TrainingArguments and PartialState make its state too), and start the "
            "script with `accelerate launch` or torchrun, which export RANK, LOCAL_RANK and "
            "WORLD_SIZE."
        )
    return announced


def _gpu_wanted() -> bool:
    return torch.cuda.is_available() and not flag("ACCELERATE_USE_CPU")


def _uses_fsdp2(plugin: Any, cpu: bool) -> bool:
    """Says whether parameters will be sharded. Raises for FSDP1 and for FSDP on the CPU."""
    if plugin is None and not flag("ACCELERATE_USE_FSDP"):
        return False
    version = int(os.environ.get("FSDP_VERSION", "1") if plugin is None else plugin.fsdp_version)
    if version != 2:
        raise ValueError(
            f"fsdp_version={version}: FSDP1 flattens parameters and knows no sequence axis. Put "
            "fsdp_version: 2 under fsdp_config in the YAML."
        )
    if cpu:
        raise ValueError(
            "FSDP on the CPU: Accelerate silently ignores it there. Put distributed_type: "
            "MULTI_GPU and use_cpu: false in the YAML (every process then holds the whole model), "
            "or run where there is a GPU; `longctx patch --cpu` writes such a YAML."
        )
    return True


def launched_sizes(
    config: LongContextConfig, dp_replicate_size: int | None, dp_shard_size: int | None
) -> tuple[int | None, int | None]:
    """(dp_replicate_size, dp_shard_size), as given or as in the launcher's parallelism_config.

    The launcher exports 1 for every size that the YAML does not name, so 1 means "not given".
    """
    if not flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return dp_replicate_size, dp_shard_size
    launched = SequenceParallelismConfig()  # refuses tp and sp
    if launched.cp_size != config.sequence_degree:
        raise ValueError(
            f"parallelism_config_cp_size: {launched.cp_size} in the YAML, but "
            f"{config.degrees_in_words} = {config.sequence_degree}: both are the number of "
            "ranks that share a sequence. "
            f"Put parallelism_config_cp_size: {config.sequence_degree} in the YAML, or change "
            "the degrees."
        )
    return (
        _above_one(launched.dp_replicate_size) if dp_replicate_size is None else dp_replicate_size,
        _above_one(launched.dp_shard_size) if dp_shard_size is None else dp_shard_size,
    )


def _above_one(size: int | None) -> int | None:
    return size if size and size > 1 else None


def _parallelism(
    config: LongContextConfig,
    num_processes: int,
    fsdp2: bool,
    replicate: int | None,
    shard: int | None,
) -> SequenceParallelismConfig:
    """Fill in the sizes that were not given; whether they fit is checked afterwards."""
    replicate, shard = data_parallel_sizes(
        num_processes // config.sequence_degree, replicate, shard, fsdp2=fsdp2
    )
    return SequenceParallelismConfig(
        dp_replicate_size=replicate,
        dp_shard_size=shard,
        cp_size=config.sequence_degree,
        tp_size=1,
        sp_size=1,
    )


def _same_batches(kwargs: dict[str, Any]) -> DataLoaderConfiguration:
    """The data-loader settings under which all ranks of a sequence group get the same rows."""
    given = kwargs.get("dataloader_config") or DataLoaderConfiguration()
    if given.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True: the ranks that share a sequence would get different rows. Use "
            "dispatch_batches=False; each process then reads its rows by itself."
        )
    split = given.split_batches or kwargs.pop("split_batches", False)
    return replace(given, dispatch_batches=False, split_batches=split)


def _exact_fsdp_plugin(kwargs: dict[str, Any]) -> Any:
    """The launcher's FSDP2 settings, with reductions in float32 and outputs left as they are."""
    from accelerate import FullyShardedDataParallelPlugin

    precision = kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    policy = exact_mixed_precision(str(precision))
    return FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)


def _check_ours(accelerator: Accelerator, parallelism: SequenceParallelismConfig) -> None:
    # Accelerate's state is shared by the process: a second Accelerator keeps the first one's mesh.
    if accelerator.state.parallelism_config != parallelism:
        raise ValueError(
            f"an Accelerator exists already in this process, made with "
            f"{accelerator.state.parallelism_config}; it would go on without the sequence axis. "
            "Call make_accelerator before any other Accelerator, and once per process."
        )


def _share_cores(accelerator: Accelerator) -> None:
    """Give each process its share of the machine's cores if its optimizer steps on the CPU:
    torchrun leaves it one. A number of threads that was set otherwise is kept."""
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    if states_on_host(accelerator) and processes is not None and torch.get_num_threads() == 1:
        torch.set_num_threads(max(1, num_cores() // int(processes)))


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
