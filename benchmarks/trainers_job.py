"""One launch of trainers.py: a trainer, a recipe, or a plain loop, over rows of random tokens.

Started by trainers.py with a file that says what to do; appends one line of JSON.
"""

import json
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from measure import Row, dtype_on, everyone, finish, own_device, slowest
from model_shapes import model_config
from report import append_line
from step_job import largest, peak_bytes
from systems import LEARNING_RATE, Job
from systems.model import checkpoint_layers, make_model, random_row
from systems.ours import Ours, launch_environment
from systems.stock import Stock
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from longctx_patch import LongContextConfig
from longctx_patch.memory.policies import POLICIES
from longctx_patch.planner.model_shape import shape_of

HEAD_TILE = 4096
PROMPTS = 4
"""A step of GRPO has so many, each in a micro-batch of its own if its rows are together."""
STOCK = {"kernel": "any", "checkpoint": "full", "liger": False}


class StepClock(TrainerCallback):
    """Notes when each optimizer step ends, with what the device held until then."""

    def __init__(self, device: torch.device, steps: int) -> None:
        """`steps`: how many steps count, the last ones."""
        self.device, self.steps = device, steps
        self.ends, self.peaks = list[float](), list[tuple[int, int]]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.note()

    def note(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(perf_counter())
        self.peaks.append(peak_bytes(self.device))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def row(self, tokens_per_step: int, num_ranks: int) -> Row:
        """Seconds of the steps that count, on the slowest rank. Collective."""
        mine = [after - before for before, after in pairwise(self.ends)][-self.steps :]
        timing = slowest([max(step) for step in zip(*everyone(mine), strict=True)])
        speed = tokens_per_step / timing.seconds / num_ranks
        peaks = largest(self.peaks[-self.steps :])
        return {**timing._asdict(), "tokens_per_s_per_gpu": speed, **peaks}


def all_steps(settings: Row) -> int:
    """How many steps are made: those that are timed, and before them a warm-up, which takes longer
    where `checkpoint` has to settle."""
    return int(settings["steps"]) + (4 if POLICIES[settings["checkpoint"]].chooses_by_layer else 2)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits).entropy()


@torch.no_grad()
def loss_of_one_process(
    model: PreTrainedModel,
    row: Tensor,
    first: int = 1,
    loss_of: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> float:
    """The stock model's mean loss over a row `[1, N]` from token `first` on, in the dtype of a
    mixed-precision step."""
    kind = row.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        hidden = model.get_decoder()(input_ids=row, use_cache=False).last_hidden_state[0]
        hidden, labels = hidden[first - 1 : -1], row[0, first:]
        total = torch.zeros((), device=row.device)
        for tile, wanted in zip(hidden.split(HEAD_TILE), labels.split(HEAD_TILE), strict=True):
            logits = model.get_output_embeddings()(tile).float()
            total += loss_of(logits, wanted).sum()
    return float(total / len(labels))


def run_loop(job: Job, model: PreTrainedModel, settings: Row) -> Row:
    """A plain loop over shards: forward, backward, clipping, the optimizer's step."""
    system = Ours(job, model, ours_options(settings, job))
    row = random_row(settings["tokens"], job.shape.vocab_size, job.device).expand(
        settings["rows"], -1
    )
    batch = system._collate([{"input_ids": ids} for ids in row.cpu()])
    system._batch = {name: value.to(job.device) for name, value in batch.items()}
    clock, first = StepClock(job.device, settings["steps"]), 0.0
    for step in range(all_steps(settings)):
        loss = system.loss()
        system.backward(loss)
        system._accelerator.clip_grad_norm_(system.model.parameters(), 1.0)
        system.update()
        first = first if step else sum(everyone(float(loss.detach()))) / job.num_ranks
        clock.note()
    return clock.row(settings["rows"] * settings["tokens"], job.num_ranks) | {"first_loss": first}


def run_group(job: Job, model: PreTrainedModel, settings: Row, *, is_peer: bool = False) -> Row:
    """A plain loop over answers to one prompt, as GRPO's policy pass is: log-probabilities of each
    answer's tokens in one pass, a loss of them, backward, clipping, and the optimizer's step. The
    peer is the stock model, every layer checkpointed, with the head of GRPOTrainer."""
    size, prompt = settings["rows"], settings["prompt"]
    drawn = random_row(size * settings["tokens"], job.shape.vocab_size, job.device)
    rows = drawn.view(size, settings["tokens"])
    rows[:, :prompt] = rows[0, :prompt]
    alone = sum(loss_of_one_process(model, row[None], prompt) for row in rows) / size
    labels = rows.masked_fill(torch.arange(rows.shape[1], device=rows.device) < prompt, -100)
    weights = torch.linspace(-1, 1, size, device=rows.device)[:, None]
    if is_peer:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)
    system = Stock(job, model, STOCK) if is_peer else Ours(job, model, ours_options(settings, job))
    clip = nn.utils.clip_grad_norm_ if is_peer else system._accelerator.clip_grad_norm_
    batch = {"input_ids": rows, "labels": labels}
    clock, first = StepClock(job.device, settings["steps"]), 0.0
    for step in range(all_steps(settings)):
        if isinstance(system, Ours):
            found = system._handle.token_log_probs(batch, model=system.model)
        else:
            found = model(**batch, fused_lm_head=True).log_probs
        system.backward((found * weights).sum() / (labels >= 0).sum())
        clip(system.model.parameters(), 1.0)
        system.update()
        first = first if step else -float(found.detach().sum() / (labels >= 0).sum())
        clock.note()
    timing = clock.row(size * settings["tokens"], job.num_ranks)
    return timing | {"first_loss": first, "alone": alone}


def run_recipe(job: Job, model: PreTrainedModel, settings: Row) -> Row:
    """The text recipe as `longctx train` starts it, timed from line to line of its metrics."""
    from longctx_patch.recipes import finetune, metrics

    place, losses = Path(settings["lines"]), list[float]()
    clock = StepClock(job.device, settings["steps"])
    own = place.with_suffix(f".{job.rank}")
    model.config.save_pretrained(own)
    # Beside a Qwen's config, transformers would take it for a Qwen's tokenizer.
    tokenizer(job.shape.vocab_size).save_pretrained(own / "words")
    # The recipe ends each document with a token of its own.
    ids = random_row(settings["tokens"] - 1, job.shape.vocab_size, job.device)[0].clamp(min=2)
    (own / "text.txt").write_text(" ".join(f"t{token}" for token in ids.tolist()))
    given: Row = {
        "model": own / "config.json",
        "tokenizer": own / "words",
        "text": own / "text.txt",
    }
    given |= {"seq-len": settings["tokens"], "max-steps": all_steps(settings)}
    given |= {"learning-rate": LEARNING_RATE, "scheduler": "constant", "ulysses": job.num_ranks}
    given |= {"checkpoint": settings["checkpoint"], "output": place.with_suffix(".out")}

    write = metrics.MetricsFile.write

    def note(file: Any, **values: Any) -> None:
        write(file, **values)
        losses.append(values["loss"])
        clock.note()

    with (
        patch.object(finetune.models, "load_model", lambda *_, **__: model),
        patch.object(metrics.MetricsFile, "write", note),
    ):
        finetune.main(["--full", *(f"--{name}={value}" for name, value in given.items())])
    return clock.row(settings["tokens"], job.num_ranks) | {"first_loss": losses[0]}


def tokenizer(vocabulary: int) -> Any:
    """A tokenizer whose word for each token is its number, with a letter: `t17`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    pad, eos = _WORDS_OF_ENDS
    known = _WORDS_OF_ENDS | {f"t{n}": n for n in range(2, vocabulary)}
    words = Tokenizer(WordLevel(known, unk_token=pad))  # a long text is read by windows of it
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=eos)


_WORDS_OF_ENDS = {"<pad>": 0, "<eos>": 1}


def common_arguments(settings: Row, job: Job) -> dict[str, Any]:
    return {
        "output_dir": str(Path(settings["lines"]).parent / "trainer"),
        "per_device_train_batch_size": 1,
        "max_steps": all_steps(settings),
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused" if job.device.type == "cuda" else "adamw_torch",
        "bf16": job.device.type == "cuda",
        "use_cpu": job.device.type == "cpu",
        "logging_steps": 1,
        "dataloader_num_workers": 1,  # a row becomes a tensor while the step before it runs
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def run_trainer(job: Job, model: PreTrainedModel, settings: Row) -> Row:
    """transformers' Trainer, whose loss is the patched model's."""
    from transformers import TrainingArguments, default_data_collator

    from longctx_patch import LongContextTrainer

    row = random_row(settings["tokens"], job.shape.vocab_size, job.device)[0].tolist()
    given = common_arguments(settings, job)
    return timed(
        lambda clock: LongContextTrainer(
            model=model,
            args=TrainingArguments(**given),
            train_dataset=[{"input_ids": row, "labels": row}] * given["max_steps"],
            data_collator=default_data_collator,
            callbacks=[clock],
            long_context=ours_config(settings, job),
        ),
        settings["tokens"],
        job,
        settings,
    )


def run_sft(job: Job, model: PreTrainedModel, settings: Row, *, is_peer: bool = False) -> Row:
    """TRL's SFTTrainer, ours by the mixin; the peer under Accelerate's context parallelism."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from longctx_patch import LongContextTrainerMixin

    class Ours(LongContextTrainerMixin, SFTTrainer):
        pass

    row = random_row(settings["tokens"], job.shape.vocab_size, job.device)[0].tolist()
    given = common_arguments(settings, job) | {"max_length": None, "packing": False}
    given |= {"dataset_kwargs": {"skip_prepare_dataset": True}}  # rows are tokenised already
    more: dict[str, Any] = {"long_context": ours_config(settings, job)}
    if is_peer:
        given |= {"parallelism_config": peers_axis(job), "gradient_checkpointing": False}
        if settings["checkpoint"] != "none":
            checkpoint_layers(model, offload=settings["checkpoint"] == "offload")
        more = {}
    return timed(
        lambda clock: (SFTTrainer if is_peer else Ours)(
            model=model,
            args=SFTConfig(**given),
            train_dataset=Dataset.from_dict({"input_ids": [row] * given["max_steps"]}),
            processing_class=tokenizer(job.shape.vocab_size),
            callbacks=[clock],
            **more,
        ),
        settings["tokens"],
        job,
        settings,
    )


def run_dpo(job: Job, model: PreTrainedModel, settings: Row, *, is_peer: bool = False) -> Row:
    """TRL's DPOTrainer with a precomputed reference, over pairs of rows; the peer is TRL's."""
    from accelerate import PartialState
    from datasets import Dataset, load_from_disk
    from trl import DPOConfig, DPOTrainer

    from longctx_patch import LongContextTrainerMixin

    class Ours(LongContextTrainerMixin, DPOTrainer):
        pass

    # The trainer ends each completion with a token of its own.
    ids = random_row(settings["tokens"] - 1, job.shape.vocab_size, job.device)[0].clamp(min=2)
    words = [f"t{token}" for token in ids.tolist()]
    prompt, answer = words[: settings["prompt"]], words[settings["prompt"] :]
    texts = {"prompt": prompt, "chosen": answer, "rejected": answer[::-1]}
    pair = {name: f" {' '.join(text)}" for name, text in texts.items()}
    given = common_arguments(settings, job) | {"max_length": None}
    more: dict[str, Any] = {} if is_peer else {"long_context": ours_config(settings, job)}
    arguments = DPOConfig(**given, precompute_ref_log_probs=True)  # joins the processes
    config = model_config(settings["model"], settings["num_layers"], settings["tokens"])
    # The ranks share it, and no other launch does: the reference's numbers are cached beside it,
    # and rows that share their beginnings round otherwise than rows apart.
    folder = f"{settings['lines']}.pairs"
    with PartialState().main_process_first():
        if job.rank == 0:
            Dataset.from_list([pair] * given["max_steps"]).save_to_disk(folder)

    def make(clock: StepClock) -> Any:
        trainer = (DPOTrainer if is_peer else Ours)(
            model=model,
            ref_model=make_model(config, job.device, model.dtype),
            args=arguments,
            train_dataset=load_from_disk(folder),
            processing_class=tokenizer(job.shape.vocab_size),
            callbacks=[clock],
            **more,
        )
        trainer.ref_model = None  # as TRL does once it has the numbers of one that it loaded
        return trainer

    return timed(make, 2 * settings["tokens"], job, settings)


def run_grpo(job: Job, model: PreTrainedModel, settings: Row, *, by_prompt: bool = False) -> Row:
    """TRL's GRPOTrainer over several prompts with answers that are drawn, not generated: a step is
    what the policy computes. Its first `entropy` is compared, since its first loss is 0."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from longctx_patch import LongContextTrainerMixin

    size, start = settings["rows"], settings["prompt"]
    tokens = random_row(PROMPTS * settings["tokens"], job.shape.vocab_size, job.device)
    rows = tokens.view(PROMPTS, -1).clamp(min=2)
    alone = [loss_of_one_process(model, row[None], start, entropy) for row in rows]

    answers = {tuple(row[:start]): row[start:] for row in rows.tolist()}

    class Drawn(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[Any], *_: Any) -> tuple[list[Any], None]:
            found = (answers[tuple(ids)] for ids in prompt_ids)
            return [turned(answer, n % size) for n, answer in enumerate(found)], None

    class Ours(LongContextTrainerMixin, Drawn):
        pass

    given = common_arguments(settings, job) | {"per_device_train_batch_size": size}
    given |= {"gradient_accumulation_steps": PROMPTS, "num_generations": size}
    given |= {"max_completion_length": settings["tokens"] - start}
    prompts = [" ".join(f"t{token}" for token in row[:start].tolist()) for row in rows]
    found = timed(
        lambda clock: Ours(
            model=model,
            reward_funcs=lambda completions, **_: [
                float(n % size) for n in range(len(completions))
            ],
            args=GRPOConfig(**given),
            train_dataset=Dataset.from_dict({"prompt": prompts * given["max_steps"]}),
            processing_class=tokenizer(job.shape.vocab_size),
            callbacks=[clock],
            group_by_prompt=by_prompt,
            long_context=ours_config(settings, job),
        ),
        PROMPTS * size * settings["tokens"],
        job,
        settings,
        "entropy",
    )
    return found | {"alone": sum(alone) / PROMPTS}


def turned(answer: list[int], count: int) -> list[int]:
    """The answer that begins `count` tokens later, with those at its end."""
    return answer[count:] + answer[:count]


def ours_options(settings: Row, job: Job) -> Row:
    return {
        "ulysses_degree": job.num_ranks,
        "checkpoint": settings["checkpoint"],
        "share_prefixes": settings.get("share_prefixes", "off"),
    }


def ours_config(settings: Row, job: Job) -> LongContextConfig:
    return LongContextConfig(**ours_options(settings, job))


def peers_axis(job: Job) -> Any:
    from accelerate import ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig

    handler = TorchContextParallelConfig(cp_comm_strategy="allgather")
    return ParallelismConfig(cp_size=job.num_ranks, cp_handler=handler)


def timed(
    make: Callable[[StepClock], Any],
    tokens_per_step: int,
    job: Job,
    settings: Row,
    compared: str = "loss",
) -> Row:
    clock = StepClock(job.device, settings["steps"])
    trainer = make(clock)
    trainer.train()
    losses = [entry[compared] for entry in trainer.state.log_history if compared in entry]
    return clock.row(tokens_per_step, job.num_ranks) | {"first_loss": losses[0]}


SYSTEMS: dict[str, Callable[..., Row]] = {
    "loop": run_loop,
    "group": run_group,
    "recipe": run_recipe,
    "trainer": run_trainer,
    "sft": run_sft,
    "sft_context_parallel": lambda *given: run_sft(*given, is_peer=True),
    "dpo": run_dpo,
    "dpo_stock": lambda *given: run_dpo(*given, is_peer=True),
    "grpo": run_grpo,
    "grpo_by_prompt": lambda *given: run_grpo(*given, by_prompt=True),
    "group_stock": lambda *given: run_group(*given, is_peer=True),
}


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    device, num_ranks = own_device(), int(os.environ.get("WORLD_SIZE", "1"))
    config = model_config(settings["model"], settings["num_layers"], settings["tokens"])
    job = Job(device, int(os.environ.get("RANK", "0")), num_ranks, shape_of(config, "model"))
    if job.shards_weights:
        os.environ.update(launch_environment(num_ranks))
    dtype = torch.float32 if job.shards_weights else dtype_on(device)
    model = make_model(config, device, dtype)
    alone = loss_of_one_process(model, random_row(settings["tokens"], job.shape.vocab_size, device))
    found = SYSTEMS[settings["system"]](job, model, settings)
    if job.rank == 0:
        row = {
            name: settings[name] for name in ("system", "tokens", "rows", "checkpoint", "prompt")
        }
        append_line({**row, "status": "ok", "alone": alone, **found}, Path(settings["lines"]))
    finish()


if __name__ == "__main__":
    main()
