"""Fine-tune a causal language model on sequences cut over several processes. Copy it and change it.

    accelerate launch --config_file recipes/accelerate/cpu_2_processes.yaml \
        -m longctx_patch.recipes.finetune --ring 2 --model MODEL --text FOLDER \
        --seq-len 32768 --rope yarn --output run/out

The order of what is done to the model matters: load, RoPE, LoRA, fused layers, patch, prepare.
`--settings FILE` reads the same settings from YAML, `--pack` fills rows with documents that don't
see each other. The output folder gets metrics.jsonl (one line per step; loss is the mean over all
tokens of the step on all processes), checkpoint-N/ and final/.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed
from datasets import disable_progress_bars
from transformers import get_scheduler
from transformers.utils.logging import disable_progress_bar

# Absolute imports: they still hold in a copy of this file.
from longctx_patch import PatchHandle, patch
from longctx_patch.checkpoints import lock
from longctx_patch.checkpoints.disk import explained_disk
from longctx_patch.checkpoints.output_folder import Output, make_output
from longctx_patch.checkpoints.series import FLIGHT, checkpoints_of
from longctx_patch.checkpoints.signals import StopSignals
from longctx_patch.health.agreement import model_facts, require_agreement
from longctx_patch.health.pace import PaceCheck
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.hf.layers.fused_layers import (
    FusedLayers,
    choose_fused_layers,
    fuse_layers,
    require_fused_layers,
)
from longctx_patch.plugin import close_accelerator, make_accelerator
from longctx_patch.recipes import hub, models
from longctx_patch.recipes.also_train import check_precision
from longctx_patch.recipes.callbacks import RunFileCallback, StagesCallback, say_stopped
from longctx_patch.recipes.context_steps import ContextStepsCallback, asked_of, check_tasks
from longctx_patch.recipes.exporting import write_final
from longctx_patch.recipes.identity import (
    check_fingerprint,
    facts_of,
    fingerprint,
    is_over,
    with_weights,
)
from longctx_patch.recipes.launch import check_launcher, one_message
from longctx_patch.recipes.memory_report import explained
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.model_card import Card, card_of
from longctx_patch.recipes.quiet import quiet_libraries
from longctx_patch.recipes.rehearsal import MemoryCallback, check_memory
from longctx_patch.recipes.run_batches import Data, build_data
from longctx_patch.recipes.run_record import (
    RECORD_FILE,
    noting_failure,
    say_ended,
    write_record,
)
from longctx_patch.recipes.settings import Settings, parse_settings, settings_file
from longctx_patch.recipes.stages import Stages, launched_at
from longctx_patch.recipes.text_trainer import Prepared, StepCallback, TextTrainer


class Inputs(NamedTuple):
    """Holds what a run is made of, without its model."""

    settings: Settings
    config: Any
    tokenizer: Any
    data: Data
    run: dict[str, Any]
    """The run's fingerprint."""


class Job(NamedTuple):
    """Everything that a run is made of, before its first step."""

    settings: Settings
    config: Any
    tokenizer: Any
    data: Data
    fused: FusedLayers
    handle: PatchHandle
    prepared: Prepared
    run: dict[str, Any]
    """The run's fingerprint."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from command-line arguments; every process of the job runs this."""
    stages = Stages()
    settings = parse_settings(arguments)
    quiet_libraries(shown=settings.library_warnings)
    check_launcher(settings_file(arguments))
    output = output_of(settings)
    output.check()
    lock.check_free(output.folder)
    with Watchdog(settings.time_limits(), folder=output.folder / FLIGHT) as watchdog:
        stages.enter("processes")
        accelerator = build_accelerator(settings)
        require_agreement(facts_of(settings), "how to train")
        is_main = accelerator.is_main_process
        if settings.push_to_hub:
            hub.require_repository(settings.push_to_hub, private=settings.hub_private, asks=is_main)
        held = lock.held(output.folder, launched=launched_at(), say=accelerator.print)
        disk = explained_disk(output.folder, output.checkpoints)
        with disk, held, noting_failure(output.folder):
            stop = train(settings, accelerator, output, stages, watchdog)
        accelerator.free_memory()
        close_accelerator(accelerator)
    if stop is None:
        return
    if stop.agreed:
        raise SystemExit(stop.exit_code)
    if settings.push_to_hub and is_main:  # the others need not wait for an upload
        place = hub.upload(settings.push_to_hub, Path(settings.output) / "final")
        print(f"uploaded to {place}", flush=True)


def output_of(settings: Settings) -> Output:
    """Returns where the run writes, and how it is asked to begin there."""
    return Output(
        folder=Path(settings.output),
        checkpoints=checkpoints_of(settings.output),
        resume=settings.resume,
        record=RECORD_FILE,
    )


def train(
    settings: Settings,
    accelerator: Any,
    output: Output,
    stages: Stages,
    watchdog: Watchdog,
) -> StopSignals | None:
    """Build everything, go on from a checkpoint if there is one, and train to the last step, or
    until a signal stops the run after a step that is saved. None where the run has ended before."""
    pace = PaceCheck(accelerator.device, accelerator.print)
    inputs = read_inputs(settings, accelerator, stages)
    if is_over(output, inputs.run, inputs.settings, {"max_steps": inputs.settings.max_steps}):
        say_ended(output.folder)
        return None
    checkpoint = output.find(accelerator.print)
    job = build(inputs, accelerator, checkpoint, stages)
    # Nothing was written so far, so a refusal above leaves no files behind.
    begin(job, accelerator)
    showing = explained(job.settings, job.handle.model.config, accelerator)
    with StopSignals() as stop, showing:
        trainer = trainer_of(job, accelerator, stages, watchdog, pace, stop)
        trainer.train(str(checkpoint) if checkpoint else None)
    if stop.agreed:
        say_stopped(trainer, stop)
        return stop
    write_final(
        trainer,
        job.tokenizer,
        output.folder,
        seed=job.settings.seed,
        config=job.config,
        card=partial(model_card, job.settings, job.config, accelerator.num_processes),
        run=job.run,
    )
    return stop


def read_inputs(settings: Settings, accelerator: Any, stages: Stages) -> Inputs:
    """Returns what the run is made of, as far as it is known before weights are read."""
    device_type = accelerator.device.type
    require_fused_layers(settings.fused_layers, device_type)
    models.check_4bit(settings, fsdp=accelerator.is_fsdp2)
    config = models.load_config(settings)
    settings = models.with_dtype(settings, config, on_cpu=device_type == "cpu")
    check_precision(settings.also_train, settings.dtype, accelerator.mixed_precision)
    stages.enter("data")  # what is wrong with it is said before weights are read
    tokenizer = models.load_tokenizer(settings)
    models.check_vocabulary(tokenizer, config)
    check_tasks(settings, tokenizer)
    data = build_data(settings, tokenizer)
    if settings.num_train_epochs:
        steps = math.ceil(settings.num_train_epochs * data.steps_of_epoch)
        settings = dataclasses.replace(settings, max_steps=steps)
    for name, rows in (*data.named_rows, ("eval data", data.evaluation)):
        if rows is not None:
            rows.say_losses(name, allowed=settings.allow_dropped, say=accelerator.print)
    run = fingerprint(
        settings,
        config=config,
        tokenizer=tokenizer,
        data=data.identity() | {"mixed_precision": str(accelerator.mixed_precision)},
        sources=settings.text,
        processes=accelerator.num_processes,
    )
    return Inputs(settings, config, tokenizer, data, run)


def build(inputs: Inputs, accelerator: Any, checkpoint: Path | None, stages: Stages) -> Job:
    """Everything of a run, checked against its checkpoint and across processes."""
    settings, device_type = inputs.settings, accelerator.device.type
    stages.enter("model")
    model = build_model(settings, inputs.config, accelerator)
    run = with_weights(inputs.run, settings.model)
    check_fingerprint(checkpoint, run, settings)
    fused = choose_fused_layers(settings.fused_layers, model, device_type)
    fuse_layers(model, fused.how)
    handle = patch(model, settings.sequence_parallelism())
    stages.enter("weights")
    goes_on = {"goes on from": checkpoint and checkpoint.name}
    facts = {"rows": run["exact"]["rows"], "fused_layers": fused.how, **goes_on}
    require_agreement(facts | model_facts(model), "what to train")
    prepared = prepare(settings, accelerator, model)
    return Job(settings, inputs.config, inputs.tokenizer, inputs.data, fused, handle, prepared, run)


def begin(job: Job, accelerator: Any) -> None:
    """Make the output folder, and say what is trained."""
    output, settings = Path(job.settings.output), job.settings
    make_output(accelerator, output)
    if accelerator.is_main_process:
        write_record(output, dataclasses.asdict(settings), accelerator.num_processes)
    fused = f"fused layers: {job.fused.how} ({job.fused.why})"
    accelerator.print(f"{fused}\nweights: {settings.dtype}")
    if job.data.summary:
        accelerator.print(job.data.summary)


def trainer_of(
    job: Job,
    accelerator: Any,
    stages: Stages,
    watchdog: Watchdog,
    pace: PaceCheck,
    stop: StopSignals,
) -> TextTrainer:
    """Returns what trains the run, with what runs beside it; every process calls this."""
    settings, data = job.settings, job.data
    trainer = TextTrainer(
        settings,
        data,
        job.handle,
        job.prepared,
        accelerator,
        tokenizer=job.tokenizer,
        pace=pace,
        watchdog=watchdog,
    )
    rehearse = None if settings.skip_rehearsal else partial(check_memory, trainer, data)
    trainer.add_callback(RunFileCallback(job.run))
    trainer.add_callback(MemoryCallback(trainer, stages, rehearse))
    trainer.add_callback(StagesCallback(stages))
    if every := settings.eval_context_steps:
        asked, tokenizer = asked_of(settings), job.tokenizer
        scores = ContextStepsCallback(trainer, asked, every=every, tokenizer=tokenizer)
        trainer.add_callback(scores)
    trainer.add_callback(StepCallback(trainer, stop))
    return trainer


def model_card(settings: Settings, config: Any, processes: int) -> Card:
    """Returns the README.md of the trained model."""
    return card_of(
        settings,
        config,
        data=settings.text,
        training={
            "packed": "yes" if settings.pack else "no",
            **{name: said for name in ("mixture", "stages") if (said := getattr(settings, name))},
            "processes": str(processes),
            "learning rate": f"{settings.learning_rate:g}, {settings.scheduler}",
        },
        numbers=(read_metrics(Path(settings.output)) or [{}])[-1],
        seed=settings.seed,
        place=settings.push_to_hub,
    )


def build_accelerator(settings: Settings) -> Any:
    """The Accelerator for the world that the launcher started."""
    accelerator = make_accelerator(settings.sequence_parallelism())
    if not (accelerator.is_main_process and sys.stderr.isatty()):
        disable_progress_bar()  # the bars of loading and saving
        disable_progress_bars()  # of reading data, which any process may do for all
    return accelerator


def build_model(settings: Settings, config: Any, accelerator: Any) -> Any:
    """The model with scaled RoPE and adapter, the same in every process.

    Where processes read their own rows of the weights, `prepare` does so later. Otherwise the
    model is on the CPU, or on the device if its weights have 4 bits.
    """
    set_seed(settings.seed)  # random weights are the same in every process
    model = models.load_model(
        settings,
        config,
        accelerator.device,
        sharded=models.reads_shards(settings),
        say=accelerator.print,
    )
    if settings.uses_lora:
        model = models.add_lora(model, settings, settings.seed, accelerator.print)
    set_seed(settings.seed, device_specific=True)  # from here on only dropout draws numbers
    return model.train()  # from_pretrained returns it in evaluation mode


def prepare(settings: Settings, accelerator: Any, model: Any) -> Prepared:
    """The optimizer of the trained weights, its scheduler, and the model wrapped for this world."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        # torch's default makes copies of all weights, which the fused kernel doesn't need.
        fused=accelerator.device.type == "cuda",
    )
    # The scheduler is not prepared by Accelerate: checkpoints save torch's own state of it.
    scheduler = get_scheduler(
        settings.scheduler,
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.max_steps,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    return Prepared(model, optimizer, scheduler)


if __name__ == "__main__":
    with one_message("finetune"):
        main()
