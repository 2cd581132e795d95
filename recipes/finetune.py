"""Fine-tune a causal language model on sequences cut over several processes. Copy it and change it.

    accelerate launch --config_file recipes/accelerate/cpu_2_processes.yaml \
        -m longctx_patch.recipes.finetune --ring 2 --model MODEL --text FOLDER \
        --seq-len 32768 --rope yarn --output run/out

The order of what is done to the model matters: load, RoPE, LoRA, fused layers, patch, prepare.
`--settings FILE` reads the same settings from YAML, `--pack` fills rows with documents that don't
see each other. The output folder gets metrics.jsonl (one line per step; loss is the mean over all
tokens of the step on all processes), checkpoints/ and final/.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed
from transformers import get_scheduler
from transformers.utils.logging import disable_progress_bar

# Absolute imports: they still hold in a copy of this file.
from longctx_patch import PatchHandle, SequenceShardCollator, patch
from longctx_patch.engine.groups import world_place
from longctx_patch.health.agreement import model_facts, require_agreement
from longctx_patch.health.finite import FiniteSteps
from longctx_patch.health.flight import FOLDER as FLIGHT
from longctx_patch.health.replicas import ReplicaCheck
from longctx_patch.health.sentinel import Sentinel
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.health.weights import check_weights
from longctx_patch.hf.layers.fused_layers import (
    choose_fused_layers,
    fuse_layers,
    require_fused_layers,
)
from longctx_patch.hf.preflight import preflight
from longctx_patch.loss.law import count_valid_tokens
from longctx_patch.plugin import close_accelerator, make_accelerator, states_on_host
from longctx_patch.recipes import hub, models
from longctx_patch.recipes.bars import ProgressBar
from longctx_patch.recipes.exporting import export_model
from longctx_patch.recipes.identity import check_fingerprint, facts_of, fingerprint
from longctx_patch.recipes.launch import check_launcher, one_message
from longctx_patch.recipes.memory_report import explained
from longctx_patch.recipes.metrics import MetricsFile, read_metrics
from longctx_patch.recipes.model_card import Card, card_of, ending, write_card
from longctx_patch.recipes.quiet import quiet_libraries
from longctx_patch.recipes.row_order import RowOrder
from longctx_patch.recipes.run_record import (
    ENDED,
    RECORD_FILE,
    has_ended,
    mark_ended,
    noting_failure,
    write_record,
)
from longctx_patch.recipes.saving import lock
from longctx_patch.recipes.saving.keeper import Keeper
from longctx_patch.recipes.saving.names import steps_of
from longctx_patch.recipes.saving.output import Output, make_output
from longctx_patch.recipes.saving.reading import load_checkpoint
from longctx_patch.recipes.saving.retention import Retention
from longctx_patch.recipes.saving.signals import StopSignals
from longctx_patch.recipes.saving.state import TrainState
from longctx_patch.recipes.settings import Settings, parse_settings, settings_file
from longctx_patch.recipes.stages import Stages, launched_at
from longctx_patch.recipes.text_rows import TextRows, rows_of_run
from longctx_patch.recipes.train_step import gradients_stay_local, train_step


class Data(NamedTuple):
    """What this process trains on."""

    rows: TextRows
    order: RowOrder
    """The order of all rows, the same in every process."""
    collator: SequenceShardCollator
    """Cuts this process's shard."""
    replica: int

    def called(self, step: int) -> list[str]:
        """The rows of this process in `step` (from 0), in words, one text per forward."""
        batches = self.order.indices(step, self.replica)
        return [", ".join(map(self.rows.called, batch)) for batch in batches]

    def identity(self) -> dict[str, Any]:
        """Equal for runs whose steps have equal rows."""
        rows = {"rows": self.rows.digest(), "num_rows": len(self.rows)}
        return {**rows, "rows_per_step": self.order.rows_per_step}

    def document(self, step: int) -> torch.Tensor:
        """The tokens of the longest document in this replica's first row of `step` (from 0)."""
        row = self.rows[self.order.indices(step, self.replica)[0][0]]
        ids = torch.tensor(row["input_ids"])
        return max(ids.split(row.get("seq_lengths", [len(ids)])), key=len)

    def metrics(self) -> dict[str, float]:
        """What every line of metrics.jsonl says about the rows."""
        return {} if self.rows.edges is None else {"packing_efficiency": self.rows.efficiency}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from command-line arguments; every process of the job runs this."""
    stages = Stages()
    settings = parse_settings(arguments)
    if not settings.library_warnings:
        quiet_libraries()
    check_launcher(settings_file(arguments))
    output = output_of(settings)
    output.check()
    lock.check_free(output.folder)
    if settings.resume == "auto" and has_ended(output.folder, max_steps=settings.max_steps):
        return print(ENDED.format(output.folder), flush=True)
    with Watchdog(settings.time_limits(), folder=output.folder / FLIGHT) as watchdog:
        stages.enter("processes")
        accelerator = build_accelerator(settings)
        require_agreement(facts_of(settings), "how to train")
        is_main = accelerator.is_main_process
        if settings.push_to_hub:
            hub.require_repository(settings.push_to_hub, private=settings.hub_private, asks=is_main)
        held = lock.held(output.folder, launched=launched_at(), say=accelerator.print)
        with held, noting_failure(output.folder):
            found = output.find(accelerator.print)
            stop = train(settings, accelerator, found, stages, watchdog)
        accelerator.free_memory()
        close_accelerator(accelerator)
    if stop.agreed:
        raise SystemExit(stop.exit_code)
    if settings.push_to_hub and is_main:  # the others need not wait for an upload
        place = hub.upload(settings.push_to_hub, Path(settings.output) / "final")
        print(f"uploaded to {place}", flush=True)


def output_of(settings: Settings) -> Output:
    """Where the run writes, and how it is asked to begin there."""
    return Output(
        folder=Path(settings.output),
        checkpoints=steps_of(settings.output),
        resume=settings.resume,
        record=RECORD_FILE,
    )


def train(
    settings: Settings,
    accelerator: Any,
    checkpoint: Path | None,
    stages: Stages,
    watchdog: Watchdog,
) -> StopSignals:
    """Build everything, go on from `checkpoint` if there is one, and train to the last step, or
    until a signal stops the run after a step that is saved."""
    device_type = accelerator.device.type
    require_fused_layers(settings.fused_layers, device_type)
    models.check_4bit(settings, fsdp=accelerator.is_fsdp2)
    config = models.load_config(settings)
    settings = models.with_dtype(settings, config, on_cpu=device_type == "cpu")
    stages.enter("data")  # what is wrong with it is said before weights are read
    tokenizer = models.load_tokenizer(settings)
    models.check_vocabulary(tokenizer, config)
    data = build_data(settings, tokenizer)
    stages.enter("model")
    model = build_model(settings, config, accelerator)
    run = fingerprint(
        settings,
        config=config,
        tokenizer=tokenizer,
        data=data.identity(),
        sources=settings.text,
        processes=accelerator.num_processes,
    )
    check_fingerprint(checkpoint, run, settings)
    fused = choose_fused_layers(settings.fused_layers, model, device_type)
    fuse_layers(model, fused.how)
    handle = patch(model, settings.sequence_parallelism())
    stages.enter("weights")
    goes_on = {"goes on from": checkpoint and checkpoint.name}
    facts = {"rows": run["exact"]["rows"], "fused_layers": fused.how, **goes_on}
    require_agreement(facts | model_facts(model), "what to train")
    state = build_state(settings, accelerator, model)
    replicas = ReplicaCheck(state.model)

    # Nothing was written so far, so a refusal above leaves no files behind.
    output = Path(settings.output)
    make_output(accelerator, output)
    if accelerator.is_main_process:
        write_record(output, dataclasses.asdict(settings), accelerator.num_processes)
    if checkpoint:
        load_checkpoint(state, checkpoint)
    check_weights(state.model, accelerator.device)
    accelerator.print(f"fused layers: {fused.how} ({fused.why})\nweights: {settings.dtype}")
    if data.rows.summary:
        accelerator.print(data.rows.summary)

    def export(folder: Path) -> None:
        model, step = state.model, state.step
        export_model(accelerator, model, tokenizer, folder, seed=settings.seed, step=step)

    kept = Retention(keep_last=settings.keep_last, keep_every=settings.keep_every)
    keeper = Keeper(series=steps_of(output), run=run, export=export, retention=kept)
    with StopSignals() as stop, explained(settings, handle.model.config, accelerator):
        if states_on_host(accelerator):
            handle.reserve_host(states_to_come(state))
        if not settings.skip_rehearsal:
            stages.enter("rehearsal")
            check_memory(accelerator, state, handle, data)
        stages.enter("first step")
        first = state.step + 1
        for _ in train_steps(settings, accelerator, state, handle, data, stop):
            watchdog.done(state.step)
            replicas.after_step(state.step)
            if state.step == first:
                stages.end(output)
            if stop.agreed or (settings.save_every and state.step % settings.save_every == 0):
                with watchdog.saving():
                    place = keeper.save(state)
            if stop.agreed and state.step < settings.max_steps:
                accelerator.print(stop.words(state.step, place), flush=True)
                return stop
    stop.agreed = 0  # what was asked for in the last step is done anyway
    watchdog.enter("end")
    final = output / "final"
    export(final)
    if accelerator.is_main_process:
        write_card(final, model_card(settings, config, accelerator.num_processes), config)
        mark_ended(output)
        print(ending(final), flush=True)
    return stop


def model_card(settings: Settings, config: Any, processes: int) -> Card:
    """What README.md of the trained model says."""
    return card_of(
        settings,
        config,
        data=settings.text,
        training={
            "packed": "yes" if settings.pack else "no",
            "processes": str(processes),
            "learning rate": f"{settings.learning_rate:g}, {settings.scheduler}",
        },
        numbers=(read_metrics(Path(settings.output)) or [{}])[-1],
        seed=settings.seed,
        place=settings.push_to_hub,
    )


def train_steps(
    settings: Settings,
    accelerator: Any,
    state: TrainState,
    handle: PatchHandle,
    data: Data,
    stop: StopSignals,
) -> Iterator[None]:
    """Train every step that is left, and stop after each, when its metrics are written."""
    writes = accelerator.is_main_process
    metrics = MetricsFile(Path(settings.output), writes=writes, first_step=state.step)
    bar = ProgressBar(total=settings.max_steps, initial=state.step, disable=not writes, unit="step")
    # The plans of a step's batches are made during the step before it.
    ahead = handle.plan_ahead(
        micro_batches(data, range(state.step, settings.max_steps)),
        depth=settings.gradient_accumulation_steps,
    )
    steps = FiniteSteps(
        state.optimizer,
        skip_bad_steps=settings.skip_bad_steps,
        max_loss_spike=settings.max_loss_spike,
        history=state.history,
    )
    sentinel = Sentinel(handle, state.model)
    while state.step < settings.max_steps:
        batches = list(islice(ahead, settings.gradient_accumulation_steps))
        values = train_step(
            accelerator,
            state,
            batches,
            steps=steps,
            max_grad_norm=settings.max_grad_norm,
            rows=partial(data.called, state.step),
            stop=stop,
        )
        handle.reserve_host(0)  # the optimizer has made its states
        if "skipped" in values:
            accelerator.print(f"step {state.step} is skipped: {values['skipped']}")
        if settings.sentinel_every and state.step % settings.sentinel_every == 0:
            drift = sentinel.check(data.document(state.step - 1))
            values["sentinel_error"] = drift.error
            if not drift.is_within:
                accelerator.print(f"step {state.step}: {drift}")
        kept = {
            "layers_not_recomputed": handle.checkpointing.num_whole_layers,
            "layers_offloaded": handle.checkpointing.num_offloaded_layers,
            "mlp_tiles": max(handle.mlp_tiles),
        }
        metrics.write(**values, **data.metrics(), **kept)
        speed = f"{values['tokens_per_second']:.0f}"
        bar.set_postfix(loss=f"{values['loss']:.4f}", tok_s=speed, refresh=False)
        bar.update()
        yield
    bar.close()


def build_accelerator(settings: Settings) -> Any:
    """The Accelerator for the world that the launcher started."""
    accelerator = make_accelerator(settings.sequence_parallelism())
    if not (accelerator.is_main_process and sys.stderr.isatty()):
        disable_progress_bar()  # the bars of loading and saving
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
        model = models.add_lora(model, settings)
    set_seed(settings.seed, device_specific=True)  # from here on only dropout draws numbers
    return model.train()  # from_pretrained returns it in evaluation mode


def build_data(settings: Settings, tokenizer: Any) -> Data:
    """Find the rows of the text, which one process of each machine makes, and their order."""
    config = settings.sequence_parallelism()
    replica, group_rank, replicas = world_place(config)
    rows = rows_of_run(settings, tokenizer)
    order = RowOrder(
        rows=rows,
        replicas=replicas,
        batch_size=settings.batch_size,
        accumulation=settings.gradient_accumulation_steps,
        seed=settings.seed,
    )
    collator = SequenceShardCollator(
        config,
        group_rank=group_rank,
        pad_token_id=(
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ),
        packed=settings.pack,
        # The rows of a forward become one row, always of the same length, so that memory is reused.
        pad_to_length=settings.seq_len * settings.batch_size if settings.pack else 0,
    )
    return Data(rows, order, collator, replica)


def micro_batches(data: Data, steps: range) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this process's shard for each forward of these steps."""
    for step in steps:
        for rows in data.order.micro_batches(step, data.replica):
            yield data.collator(rows)


def build_state(settings: Settings, accelerator: Any, model: Any) -> TrainState:
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
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler)


def check_memory(accelerator: Any, state: TrainState, handle: PatchHandle, data: Data) -> None:
    """Rehearse a step with three layers on a GPU, and print the memory predicted for all layers."""
    batch = next(micro_batches(data, range(state.step, state.step + 1)))
    batch = {name: value.to(accelerator.device) for name, value in batch.items()}
    tokens = count_valid_tokens([batch])

    def loss() -> torch.Tensor:
        shard: torch.Tensor = state.model(**batch, num_valid_tokens=tokens, use_cache=False).loss
        return shard

    with gradients_stay_local(accelerator, state.model, until_last=True):
        goes_on = bool(state.optimizer.state)
        found = preflight(
            handle,
            loss,
            accelerator.backward,
            has_optimizer_states=goes_on,
            num_forwards=data.order.accumulation,
        )
    if found is not None:
        accelerator.print(f"memory: {found}")


def states_to_come(state: TrainState) -> int:
    """Bytes of this process's gradients and of AdamW's two states, before the first step."""
    if state.optimizer.state:
        return 0
    trained = [p for p in state.model.parameters() if p.requires_grad]
    return 3 * sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in trained)


if __name__ == "__main__":
    with one_message("finetune"):
        main()
