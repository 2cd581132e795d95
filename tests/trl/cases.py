"""TRL's trainers over a tiny model and a tiny language, as they run alone and with long context."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from longctx_patch import LongContextConfig, LongContextTrainerMixin
from tests.hf.tiny import VOCABULARY, featured_model
from tests.plugin.launched import sharding_on_cpus
from tests.trainer.trained import STEPS, Trained, found_of, numbers

WORDS = VOCABULARY - 4
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} <eos> {% endgeneration %}{% else %}<user> {{ m.content }} {% endif %}"
    "{% endfor %}"
)


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", "<user>", *(f"w{n}" for n in range(WORDS))]
    model = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    found.chat_template = CHAT
    return found


def texts(number: int, seed: int, longest: int) -> Iterator[str]:
    """Texts of 3 to `longest` words."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        length = int(torch.randint(3, longest + 1, (1,), generator=generator))
        ids = torch.randint(0, WORDS, (length,), generator=generator).tolist()
        yield " ".join(f"w{word}" for word in ids)


def rows(kind: str, number: int, seed: int) -> list[dict[str, Any]]:
    """Rows of one of the kinds that TRL's trainers take."""
    has_sums = kind in ("pairs", "labelled", "answers")  # as exact as they are small
    longest = 7 if has_sums else 17
    parts = (texts(number, seed + 1000 * part, n) for part, n in enumerate((17, longest, longest)))
    together = list(zip(*parts, strict=True))
    if kind == "prompts":
        return [{"prompt": a} for a, _, _ in together]
    if kind == "text":
        return [{"text": f"{a} {b}"} for a, b, _ in together]
    if kind == "chat":
        roles = ("user", "assistant", "user", "assistant")
        turns = [zip(roles, (a, b, "w1 w2", c), strict=True) for a, b, c in together]
        return [{"messages": [{"role": r, "content": t} for r, t in four]} for four in turns]
    if kind == "completion":
        return [{"prompt": a, "completion": f" {b}"} for a, b, _ in together]
    if kind == "turns":
        return list(answers_in_turn(together))
    if kind == "pairs":
        return [{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in together]
    same = 4 if kind == "answers" else 1  # rows of one prompt
    return [
        {"prompt": together[n // same * same][0], "completion": f" {b}", "label": n % 3 > 0}
        for n, (_, b, _) in enumerate(together)
    ]


def answers_in_turn(together: Sequence[tuple[str, ...]]) -> Iterator[dict[str, str]]:
    """Yields conversations of six answers, each of which goes on from the one before it."""
    so_far = ""
    for number, (opening, answer, _) in enumerate(together):
        so_far = so_far if number % 6 else opening
        yield {"prompt": so_far, "completion": f" {answer}"}
        so_far += f" {answer}"


TRAINERS: dict[str, tuple[type, type]] = {
    "sft": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
    "grpo": (GRPOConfig, GRPOTrainer),
    "rloo": (RLOOConfig, RLOOTrainer),
}
GENERATING = "grpo", "rloo"


@dataclass(frozen=True)
class Case:
    """A run of a trainer, with long context and on one process for each sequence group."""

    name: str
    trainer: str
    rows: str
    config: dict[str, Any]
    family: str = "llama"
    adapter: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    """More arguments where the model is patched: those of FSDP2."""
    layers: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    mixin: dict[str, Any] = field(default_factory=dict)
    """Arguments beside `long_context`."""
    not_compared: tuple[str, ...] = ()
    """Names in the log."""


def write_rows(cases: Sequence[Case], folder: Path) -> None:
    """The datasets of the cases, as files: processes share what is made of them. Also the
    references that TRL loads by itself, for GRPO and RLOO without an adapter."""
    for case in cases:
        if case.trainer in GENERATING and not case.adapter:
            moved(model_of(case)).save_pretrained(folder / case.name / "model")
        for name, number, seed in (("train", 12, 1), ("eval", 7, 2)):
            found = Dataset.from_list(rows(case.rows, number, seed))
            found.save_to_disk(str(folder / case.name / name))


def model_of(case: Case) -> Any:
    return featured_model(case.family, num_hidden_layers=case.layers, **case.model)


def train_all(runs: Sequence[tuple[Case, bool]], folder: Path) -> list[Trained]:
    """`runs`: cases, and whether their models are patched."""
    return [train(case, folder / case.name, is_patched) for case, is_patched in runs]


def train(case: Case, folder: Path, is_patched: bool, **given: Any) -> Trained:
    """Train, with an evaluation at the end."""
    shards = bool(case.sharding) and is_patched
    with sharding_on_cpus() if shards else nullcontext():
        trainer = make_trainer(case, folder, is_patched, **given)
        trainer.train()
        evaluated = trainer.evaluate()
    assert isinstance(trainer.model_wrapped, FSDPModule) == shards
    found = found_of(trainer, numbers(evaluated))
    for entry, name in product(found.logged, case.not_compared):
        entry.pop(name, None)
    if is_patched:
        trainer.unpatch()
    return found


def make_trainer(case: Case, folder: Path, is_patched: bool, **given: Any) -> Any:
    """`given`: what the trainer gets in place of the case's own."""
    arguments, cls = TRAINERS[case.trainer]
    options, usual = case.arguments, dict[str, Any]()
    if is_patched:
        cls = type("Patched", (LongContextTrainerMixin, cls), {})
        usual |= case.mixin | {"long_context": LongContextConfig(**case.config)}
        options = options | case.sharding
    if "model" not in given:
        usual["model"] = model_of(case)
        usual["model"].config._name_or_path = str(folder / "model")  # where TRL finds a reference
    if case.adapter:
        usual["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    elif case.trainer in ("dpo", "kto") and "model" not in given:
        usual["ref_model"] = moved(model_of(case))
    if case.trainer in GENERATING:
        usual["reward_funcs"] = early_words
    if "train_dataset" not in given:
        usual["train_dataset"] = load_from_disk(str(folder / "train"))
        usual["eval_dataset"] = load_from_disk(str(folder / "eval"))
    trainer = cls(
        args=arguments(output_dir=str(folder / "out"), **USUAL | options),
        **{"processing_class": tokenizer()} | usual | given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def early_words(completions: list[str], **_: Any) -> list[float]:
    """A reward: the share of words that come early in the vocabulary, and shortness."""
    numbers_of = [[int(word[1:]) for word in c.split() if word[1:].isdigit()] for c in completions]
    return [sum(n < 40 for n in ns) / (1 + len(ns)) - 0.03 * len(ns) for ns in numbers_of]


USUAL: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "optim": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def moved(model: Any) -> Any:
    """A reference that is not the policy."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model
