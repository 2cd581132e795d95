"""Refuses by name, on all ranks, what a trainer can't do exactly with a patched model."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from transformers import Trainer

from longctx_patch.checkpoints.whole_files import name_problem
from longctx_patch.config import LongContextConfig
from longctx_patch.data import SHARD_KEY, SequenceShardCollator
from longctx_patch.rules.launched import flag
from longctx_patch.trainer.axis import num_processes
from longctx_patch.trainer.generation import GENERATING

TRL_TRAINERS = frozenset({"SFTTrainer", "DPOTrainer", "KTOTrainer"}) | GENERATING
"""Trainers of TRL whose losses are made of what the patched model gives back."""


def require_mixin_first(cls: type, mixin: type) -> None:
    """Raise TypeError if a trainer comes before the mixin among the bases of a class, so that the
    mixin's overrides would never run."""
    before = cls.__mro__[1 : cls.__mro__.index(mixin)]
    trainers = [
        base for base in before if issubclass(base, Trainer) and not issubclass(base, mixin)
    ]
    if trainers:
        name = trainers[0].__name__
        raise TypeError(
            f"{cls.__name__} has {name} before {mixin.__name__}: {name}'s own methods would run in "
            f"place of the mixin's. Write class {cls.__name__}({mixin.__name__}, {name})."
        )


def argument_problems(args: Any, config: LongContextConfig, data_parallel: int) -> Iterable[str]:
    """Says what TrainingArguments ask for that is refused, in words.

    Args:
        data_parallel: number of sequence groups.
    """
    if problem := name_problem(args.output_dir, "output_dir"):
        yield problem
    if args.n_gpu > 1:
        yield (
            f"n_gpu={args.n_gpu}: one process with several GPUs runs torch's DataParallel, which "
            "copies the model. Start a process for each GPU: torchrun --nproc_per_node "
            f"{args.n_gpu}, or accelerate launch."
        )
    if getattr(args, "deepspeed", None) or flag("ACCELERATE_USE_DEEPSPEED"):
        yield (
            "deepspeed is set: it brings its own attention and process groups. Leave it out, and "
            'use fsdp=True with fsdp_config={"version": 2}.'
        )
    if config.sequence_degree == 1:
        return
    yield from _exactness_problems(args, data_parallel)


def cut_by_default(args: Any) -> str | None:
    """Says that TRL cuts rows at a length that nobody may have set; None where it doesn't."""
    field = getattr(type(args), "__dataclass_fields__", {}).get("max_length")
    if field is None or args.max_length is None or args.max_length != field.default:
        return None
    return (
        f"{type(args).__name__} has max_length={args.max_length}, TRL's default: longer rows are "
        "cut there, and those left without anything to learn may be dropped. Set max_length=None "
        "to keep rows whole."
    )


def _exactness_problems(args: Any, data_parallel: int) -> Iterable[str]:
    if args.neftune_noise_alpha is not None:
        yield (
            f"neftune_noise_alpha={args.neftune_noise_alpha}: each rank would add other noise to "
            "its part of a row than one process adds. Leave it out."
        )
    if getattr(args, "torch_compile", False):
        yield (
            "torch_compile=True: the trainer would compile the whole model, and messages between "
            "ranks can't be traced. Leave it out."
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True: a rank that runs out of memory would leave the others "
            "waiting. Set per_device_train_batch_size, and LongContextConfig(checkpoint='auto')."
        )
    if getattr(args.accelerator_config, "split_batches", False):
        yield (
            "split_batches=True in accelerator_config: the ranks that share a sequence would get "
            "different rows. Leave it out; a batch size counts the rows of one sequence group."
        )
    if getattr(args.accelerator_config, "dispatch_batches", None):
        yield (
            "dispatch_batches=True in accelerator_config: the first process would read for all, "
            "and count the ranks that share a sequence as replicas. Leave it out, or use False."
        )
    if args.dataloader_num_workers > 1 and not getattr(args, "dataloader_in_order", True):
        yield (
            f"dataloader_in_order=False with dataloader_num_workers={args.dataloader_num_workers}: "
            "ranks that share a sequence would get rows in another order. Leave it out."
        )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        yield (
            "train_sampling_strategy='batch_rebalance': its sampler gives each rank other rows, "
            "also those that share a sequence. Use 'group_by_length' or 'random'."
        )
    if not args.average_tokens_across_devices and data_parallel > 1:
        yield (
            f"average_tokens_across_devices=False with {data_parallel} sequence groups: each group "
            "would divide by its own tokens, and tokens of short rows would count more. Leave it "
            "out."
        )


def trainer_problems(trainer: Any, config: LongContextConfig) -> Iterable[str]:
    """Says what a trainer that was made asks for, in words."""
    if isinstance(trainer.data_collator, SequenceShardCollator):
        yield (
            "data_collator is a SequenceShardCollator: under a trainer the model takes whole rows "
            "and cuts them itself. Give the collator that you would use with one process."
        )
    if isinstance(trainer.lr_scheduler, AcceleratedScheduler):
        yield (
            "the lr_scheduler in optimizers=(...) is a prepared one, which steps once per process, "
            "so that the schedule would end too early. Give the scheduler itself."
        )
    unknown = [name for name in trl_trainers(type(trainer)) if name not in TRL_TRAINERS]
    if unknown:
        yield (
            f"{unknown[0]} of TRL: each rank would generate rows or ask a teacher by itself, and "
            "the ranks of a group would train on different rows. Supported are "
            f"{', '.join(sorted(TRL_TRAINERS))}, and transformers' Trainer."
        )
    if config.shifted_group and set(trl_trainers(type(trainer))) - {"SFTTrainer"}:
        yield (
            f"shifted_group={config.shifted_group} with {trl_trainers(type(trainer))[0]}: it "
            "compares or generates with full attention what it trains with shifted groups. Use "
            "SFTTrainer or transformers' Trainer, or shifted_group=0."
        )
    if config.sequence_degree > 1:
        yield from _loss_problems(trainer, config)


def _loss_problems(trainer: Any, config: LongContextConfig) -> Iterable[str]:
    args = trainer.args
    liger = getattr(args, "liger_kernel_config", None) or {}
    if args.use_liger_kernel and liger.get("fused_linear_cross_entropy", True):
        yield (
            "use_liger_kernel=True with its fused cross entropy, which replaces the forward of "
            'the model. Use liger_kernel_config={"fused_linear_cross_entropy": False}; '
            'LongContextConfig(loss="chunked") makes no logits either.'
        )
    if config.loss == "logits":
        return
    needs_logits = (
        f"with loss={config.loss!r}: the trainer would compute its loss from logits of whole rows, "
        'which are never made. Use LongContextConfig(loss="logits")'
    )
    if args.label_smoothing_factor:
        yield f"label_smoothing_factor={args.label_smoothing_factor} {needs_logits}, or 0."
    # TRL sets a text where transformers would scale a loss otherwise, which calls nothing.
    if callable(trainer.compute_loss_func):
        yield (
            f"compute_loss_func {needs_logits}, or override compute_loss and use "
            "self.long_context_handle.token_log_probs(inputs, model=model)."
        )
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        if getattr(trainer, name, None) is not None and not args.prediction_loss_only:
            yield (
                f"{name} with loss={config.loss!r}: it is computed from logits of whole rows, "
                'which are never made. Use LongContextConfig(loss="logits"), or leave it out.'
            )


def trl_trainers(cls: type) -> list[str]:
    """Public trainers of TRL that a class inherits from, nearest first."""
    ours = (base for base in cls.__mro__ if base.__module__.split(".")[0] == "trl")
    return [base.__name__ for base in ours if not base.__name__.startswith("_")]


def accelerator_problems(accelerator: Any, degree: int) -> Iterable[str]:
    """Says what is wrong with the Accelerator that a trainer has made, in words."""
    found = accelerator.state.parallelism_config
    size = 1 if found is None else found.tp_size
    is_ours = degree == 1 or not getattr(found, "tp_enabled", True)
    if size != degree or not is_ours:
        yield (
            f"parallelism_config={found!r} for {degree} ranks per sequence: the trainer would give "
            "them different rows or count them wrongly. Leave it out of TrainingArguments, or use "
            "trainer_parallelism(config); make TrainingArguments anew after another Accelerator."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and not accelerator.is_fsdp2:
        yield (
            f"fsdp_version={plugin.fsdp_version}: FSDP1 flattens parameters and knows no sequence "
            'axis. Use fsdp_config={"version": 2}, or fsdp_version: 2 in the YAML.'
        )


@contextmanager
def explains_missing_logits(config: LongContextConfig) -> Iterator[None]:
    """Add to an error within the context what it may come from, where no logits are made."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if config.sequence_degree > 1 and config.loss != "logits" and "NoneType" in str(error):
            error.add_note(
                f"With loss={config.loss!r} a batch with labels has no outputs.logits: they are "
                'None. Where your code reads them, use LongContextConfig(loss="logits"), or '
                "self.long_context_handle.token_log_probs(inputs, model=model)."
            )
        raise


def refuse_shards(batches: Iterable[Any]) -> None:
    """Raise ValueError for batches of SequenceShardCollator."""
    if any(isinstance(batch, Mapping) and SHARD_KEY in batch for batch in batches):
        raise ValueError(
            f"a batch with {SHARD_KEY}: under a trainer the model takes whole rows and cuts them "
            "itself. Don't call SequenceShardCollator; collate as with one process."
        )


def shared_cache_problems(dataset: Any) -> Iterable[str]:
    """Says why TRL can't hand on what its first process computes beside a dataset, in words."""
    if num_processes() > 1 and getattr(dataset, "cache_files", None) == []:
        yield (
            "precompute_ref_log_probs with a dataset in memory: TRL's first process writes the "
            "numbers into a file beside the dataset, and each process would look for it in a "
            "folder of its own. Use dataset.save_to_disk(folder) on one process and "
            "datasets.load_from_disk(folder) on all."
        )
