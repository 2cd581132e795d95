"""A run over one of TRL's trainers: load, RoPE, LoRA, fused layers, data, train, save.

`sft.py` and `dpo.py` are the two recipes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import set_seed
from transformers import EarlyStoppingCallback

from longctx_patch.checkpoints import lock
from longctx_patch.checkpoints.disk import explained_disk
from longctx_patch.checkpoints.output_folder import Output, make_output
from longctx_patch.checkpoints.series import FLIGHT, checkpoints_of
from longctx_patch.checkpoints.signals import StopSignals
from longctx_patch.families.load_config import is_bare_config
from longctx_patch.health.agreement import require_agreement
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.hf.layers.fused_layers import (
    choose_fused_layers,
    fuse_layers,
    require_fused_layers,
)
from longctx_patch.plugin import close_accelerator
from longctx_patch.plugin.start import choose_gloo_interface
from longctx_patch.recipes import hub, models
from longctx_patch.recipes.also_train import check_precision
from longctx_patch.recipes.callbacks import (
    MetricsCallback,
    RunFileCallback,
    StagesCallback,
    StopCallback,
    say_stopped,
)
from longctx_patch.recipes.context_steps import ContextStepsCallback, asked_of, check_tasks
from longctx_patch.recipes.exporting import write_final
from longctx_patch.recipes.identity import check_fingerprint, facts_of, is_over, with_weights
from longctx_patch.recipes.launch import check_launcher
from longctx_patch.recipes.model_card import Card, card_of
from longctx_patch.recipes.quiet import quiet_libraries
from longctx_patch.recipes.rehearsal import MemoryCallback
from longctx_patch.recipes.row_order import check_batch
from longctx_patch.recipes.run_record import (
    RECORD_FILE,
    noting_failure,
    say_ended,
    write_record,
)
from longctx_patch.recipes.settings import DtypeName
from longctx_patch.recipes.settings_file import file_and_flags
from longctx_patch.recipes.stages import Stages, launched_at
from longctx_patch.recipes.trl_data import RunData, load_data, reading_of
from longctx_patch.recipes.trl_identity import trl_fingerprint
from longctx_patch.recipes.trl_memory import check_longest, explained_run
from longctx_patch.recipes.trl_settings import TrlSettings, parse
from longctx_patch.trainer.watching import plain_arguments

RECORDED = (
    *("max_steps", "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("weight_decay", "per_device_train_batch_size", "gradient_accumulation_steps", "seed"),
)
"""The trainer's own settings that settings.json has."""


@dataclass(frozen=True)
class Method:
    """Says what is learned."""

    name: str
    """As the module and its settings file are called."""
    config: type
    trainer: type
    compares: bool = False
    """Whether the trainer compares with the model as it was."""


class Inputs(NamedTuple):
    """Holds what a run is made of, without its model."""

    settings: TrlSettings
    config: Any
    tokenizer: Any
    data: RunData
    run: dict[str, Any]
    """The run's fingerprint."""


def run(method: Method, arguments: Sequence[str] | None = None) -> Any:
    """Run from command-line arguments (default: `sys.argv`); every process of the job calls this.

    Returns the trainer, whose model is no longer patched, and whose processes have parted; None
    where the run has ended before.
    """
    stages = Stages()
    stages.enter("processes")
    choose_gloo_interface()  # the trainer's arguments set up torch.distributed
    quiet_libraries()  # of reading the settings too
    settings, args = parse(method.config, arguments)
    quiet_libraries(shown=settings.library_warnings)
    check_launcher(file_and_flags("--config", arguments)[0], method.name)
    output = output_of(settings, args)
    output.check()
    lock.check_free(output.folder)
    if args.push_to_hub:
        private = bool(args.hub_private_repo)
        hub.require_repository(args.hub_model_id, private=private, asks=args.process_index == 0)
    say = args.distributed_state.print
    with (
        Watchdog(settings.time_limits(), folder=output.folder / FLIGHT) as watchdog,
        explained_disk(output.folder, output.checkpoints),
        lock.held(output.folder, launched=launched_at(), say=say),
        noting_failure(output.folder),
    ):
        stop = StopSignals()
        arguments_too = {"arguments": plain_arguments(args)}
        require_agreement(facts_of(settings) | arguments_too, "how to train")
        inputs = read_inputs(settings, args, stages)
        length = {name: getattr(args, name) for name in ("max_steps", "num_train_epochs")}
        if is_over(output, inputs.run, settings, length):
            say_ended(output.folder)
            args.distributed_state.wait_for_everyone()
            args.distributed_state.destroy_process_group()
            return None
        trainer = train(method, inputs, args, output.find(say), stages, watchdog, stop)
        close_accelerator(trainer.accelerator)  # the others need not wait for an upload
    if stop.agreed:
        raise SystemExit(stop.exit_code)
    if args.push_to_hub and args.process_index == 0:
        # Over what the trainer has uploaded of its checkpoints.
        print(f"uploaded to {hub.upload(args.hub_model_id, output.folder / 'final')}", flush=True)
    return trainer


def output_of(settings: TrlSettings, args: Any) -> Output:
    """Returns where the run writes, and how it is asked to begin there."""
    return Output(
        folder=Path(args.output_dir),
        checkpoints=checkpoints_of(args.output_dir),
        resume=settings.resume,
        record=RECORD_FILE,
    )


def train(
    method: Method,
    inputs: Inputs,
    args: Any,
    resumed: Path | None,
    stages: Stages,
    watchdog: Watchdog,
    stop: StopSignals,
) -> Any:
    """Build the trainer, go on from the checkpoint `resumed` if there is one, train to the end or
    until a signal stops the run after a step that is saved."""
    settings = inputs.settings
    trainer = build(method, inputs, args, stages, watchdog, resumed)
    output, is_main = Path(args.output_dir), trainer.accelerator.is_main_process
    make_output(trainer.accelerator, output)
    if is_main:
        values = args.to_dict()
        used = {name: values[name] for name in RECORDED}
        write_record(output, dataclasses.asdict(settings) | used, args.world_size)
    trainer.add_callback(StopCallback(stop))
    rehearse = None if settings.skip_rehearsal else partial(check_longest, trainer)
    trainer.add_callback(MemoryCallback(trainer, stages, rehearse))
    trainer.add_callback(StagesCallback(stages))
    if every := settings.eval_context_steps:
        trainer.add_callback(ContextStepsCallback(trainer, asked_of(settings), every=every))
    with stop, explained_run(settings, args, trainer, compares=method.compares):
        trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    if stop.agreed:
        say_stopped(trainer, stop)
        trainer.unpatch()
        return trainer
    write_final(
        trainer,
        trainer.processing_class,
        output,
        seed=args.seed,
        config=trainer.model.config,
        card=partial(model_card, method, settings, trainer),
        run=with_weights(inputs.run, settings.model),
    )
    trainer.unpatch()
    return trainer


def model_card(method: Method, settings: TrlSettings, trainer: Any) -> Card:
    """Returns the README.md of the trained model."""
    args, numbers = trainer.args, {"step": trainer.state.global_step}
    for line in trainer.state.log_history:  # the last of each
        numbers |= {name: line[name] for name in ("loss", "eval_loss") if name in line}
    return card_of(
        settings,
        trainer.model.config,
        data=settings.data,
        training={
            "method": f"{method.name}, by TRL",
            "processes": str(args.world_size),
            "learning rate": f"{args.learning_rate:g}, {args.to_dict()['lr_scheduler_type']}",
        },
        numbers=numbers,
        seed=args.seed,
        place=args.hub_model_id if args.push_to_hub else "",
    )


def read_inputs(settings: TrlSettings, args: Any, stages: Stages) -> Inputs:
    """Returns what the run is made of, as far as it is known before weights are read."""
    device_type = args.device.type
    require_fused_layers(settings.fused_layers, device_type)
    models.check_4bit(settings, fsdp=bool(args.fsdp))
    config = models.load_config(settings)
    settings = models.with_dtype(settings, config, on_cpu=device_type == "cpu")
    mixed_precision = "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
    check_precision(settings.also_train, settings.dtype, mixed_precision)
    tokenizer = models.load_tokenizer(settings)
    models.check_vocabulary(tokenizer, config)
    check_tasks(settings, tokenizer)
    stages.enter("data")
    data = load_data(settings, args, reading_of(settings, args, tokenizer, config.vocab_size))
    data.say_losses(args.distributed_state.print)
    size = args.per_device_train_batch_size
    if not settings.streaming and size != type(args).per_device_train_batch_size:
        check_batch("per_device_train_batch_size", size, len(data.train))
    run = trl_fingerprint(settings, args, config=config, tokenizer=tokenizer, rows=data.train)
    return Inputs(settings, config, tokenizer, data, run)


def build(
    method: Method,
    inputs: Inputs,
    args: Any,
    stages: Stages,
    watchdog: Watchdog,
    resumed: Path | None,
) -> Any:
    """The trainer of a run, which may go on from the checkpoint `resumed`."""
    settings, config, tokenizer, data, run = inputs
    if hasattr(args, "assistant_only_loss"):
        args.assistant_only_loss = False  # labels say it already
    stages.enter("model")
    # What is computed ahead needs weights before the trainer shards them.
    sharded = models.reads_shards(settings) and not getattr(args, "precompute_ref_log_probs", False)
    model = load(settings, config, args, sharded=sharded)
    given: dict[str, Any] = {}
    if method.compares and not settings.uses_lora:  # else the model with its adapter off
        dtype = reference_dtype(settings, config, args, sharded=sharded)
        given["ref_model"] = load(replace(settings, dtype=dtype), config, args, sharded=sharded)
    run = with_weights(run, settings.model)
    check_fingerprint(resumed, run, settings)
    stages.enter("trainer")
    trainer = method.trainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=tokenizer,
        callbacks=callbacks(settings, args, run),
        long_context=settings.sequence_parallelism(),
        watchdog=watchdog,
        skip_bad_steps=settings.skip_bad_steps,
        sentinel_every=settings.sentinel_every,
        keep_every=settings.keep_every,
        save_in_background=settings.save_in_background,
        **given,
    )
    number = f"{len(data.train):,}" if hasattr(data.train, "__len__") else "a stream of"
    trainer.accelerator.print(f"{number} rows of {settings.seq_len} tokens at most")
    return trainer


def reference_dtype(settings: TrlSettings, config: Any, args: Any, *, sharded: bool) -> DtypeName:
    """The dtype in which a reference that is not trained holds its weights.

    Under FSDP2 with mixed precision a layer is rounded to the low precision before it computes, so
    that weights which the checkpoint has in it may stay so, in half the memory of float32. Random
    weights would be others, and those that follow the trained ones need its digits.
    """
    low: DtypeName = models.weights_dtype(config, frozen=True)
    computed = {"bfloat16": args.bf16, "float16": args.fp16}.get(low, False)
    keeps = sharded and computed and settings.dtype == "float32"
    if keeps and not (is_bare_config(settings.model) or args.sync_ref_model):
        return low
    return settings.dtype


def load(settings: TrlSettings, config: Any, args: Any, *, sharded: bool = False) -> Any:
    """The model with scaled RoPE, adapter and fused layers, the same in every process."""
    set_seed(args.seed)  # random weights are the same in every process
    say = args.distributed_state.print
    model = models.load_model(settings, config, args.device, sharded=sharded, say=say)
    if settings.uses_lora:
        model = models.add_lora(model, settings, args.seed, say)
    fuse_layers(model, choose_fused_layers(settings.fused_layers, model, args.device.type).how)
    return model


def callbacks(settings: TrlSettings, args: Any, run: Mapping[str, Any]) -> list[Any]:
    """Returns what runs beside the trainer. `run`: the fingerprint that its checkpoints get."""
    found: list[Any] = [MetricsCallback(args.world_size), RunFileCallback(run)]
    if settings.early_stopping:
        found.append(EarlyStoppingCallback(settings.early_stopping))
    return found
