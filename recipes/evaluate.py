"""Evaluate models on long contexts, over the processes of a launcher.

`longctx eval MODEL --out FOLDER` checks what is asked, writes it into FOLDER and starts this; with
`--dry-run` it is left to you, on several machines too:

    accelerate launch --config_file FOLDER/accelerate.yaml -m longctx_patch.recipes.evaluate FOLDER
"""

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from longctx_patch import patch
from longctx_patch.checkpoints.whole_files import write_whole
from longctx_patch.evaluation.context_evaluation import ContextEvaluation, evaluate_context
from longctx_patch.evaluation.tasks import TASKS, Sources, make_at_lengths, read_questions
from longctx_patch.plugin import close_accelerator, make_accelerator
from longctx_patch.plugin.accelerator import shard_frozen
from longctx_patch.recipes import models
from longctx_patch.recipes.data.text_reading import TextReading, documents_of, tokens_of
from longctx_patch.recipes.evaluated import Evaluated, config_of, load, notes_of, with_dtype
from longctx_patch.recipes.launch import one_message
from longctx_patch.recipes.quiet import quiet_libraries
from longctx_patch.recipes.settings import parallelism_of
from longctx_patch.recipes.stages import launched_at
from longctx_patch.rules.names import require_choice

ASKED_FILE, SCORES_FILE = "asked.json", "scores.json"
FILES = ("essays", "squad", "hotpotqa", "english_words")
"""Options that name a file of RULER's data."""
RULER = "ruler"
"""A name for all of its tasks."""
MOST_TEXTS = 16
"""Documents whose losses are averaged: more hardly change the means."""
MOST_CHARACTERS = 2**23
"""The user's text is a haystack of so many, repeated where a row is longer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """What is evaluated, on which models."""

    models: Sequence[Evaluated]
    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    depths: tuple[float, ...]
    """In percent; none: as each task has them."""
    samples: int
    """How many each task has at each length and depth."""
    text: Sequence[str]
    """Sources of held-out text."""
    text_field: str
    longppl: bool
    seed: int
    essays: str = ""
    squad: str = ""
    hotpotqa: str = ""
    english_words: str = ""
    """Files of RULER's own data, where there are some."""
    questions: str = ""
    """A file of the user's own, with their answers."""
    haystack: Sequence[str] = ()
    """Sources of the text that hides needles; none: the held-out text."""

    @classmethod
    def read(cls, folder: Path) -> "EvalSettings":
        """Returns what was written into a folder."""
        found = json.loads((folder / ASKED_FILE).read_text(encoding="utf-8"))
        found["models"] = [Evaluated(**model) for model in found["models"]]
        return cls(**found)

    def write(self, folder: Path) -> None:
        """Write it into a folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(self), indent=2)
        (folder / ASKED_FILE).write_text(text + "\n", encoding="utf-8")

    def asked(self, model: Evaluated, tokenizer: Any) -> ContextEvaluation:
        """The same as the library takes it. Raises ValueError where the data don't fit."""
        longest = max(self.lengths)
        return ContextEvaluation(
            lengths=tuple(self.lengths),
            texts=long_texts(self.text, TextReading(tokenizer, self.text_field), longest),
            longppl=self.longppl,
            tasks=tasks_of(self.tasks),
            sources=self.sources(),
            own=tuple(read_questions(Path(self.questions), tokenizer, longest))
            if self.questions
            else (),
            depths=tuple(depth / 100 for depth in self.depths) or None,
            samples=self.samples,
            seed=self.seed,
            label=model.label,
        )

    def sources(self) -> Sources:
        """Returns what the tasks' texts are made of."""
        files = {name: Path(getattr(self, name)) for name in FILES if getattr(self, name)}
        return Sources(**files, text=joined_text(self.haystack or self.text, self.text_field))


def joined_text(sources: Sequence[str], text_field: str) -> str | None:
    """The first documents of the sources, one after another; None without sources."""
    found, size = list[str](), 0
    for document in documents_of(sources, text_field):
        found.append(document)
        if (size := size + len(document)) > MOST_CHARACTERS:
            break
    return "\n\n".join(found) or None


def tasks_of(names: Sequence[str]) -> tuple[str, ...]:
    """The tasks by names of which `ruler` stands for its 13, each once."""
    each = ([*TASKS][1:] if name == RULER else [name] for name in names)
    return tuple(dict.fromkeys(chain.from_iterable(each)))


def long_texts(
    sources: Sequence[str], reading: TextReading, length: int
) -> tuple[tuple[int, ...], ...]:
    """The first documents of at least `length` tokens, as so many ids each; none without sources.

    Raises ValueError where no document is as long.
    """
    if not sources:
        return ()
    found, sizes = list[tuple[int, ...]](), list[int]()
    for text in documents_of(sources, reading.text_field):
        (ids,) = tokens_of([text], reading.tokenizer)
        sizes.append(len(ids))
        if len(ids) >= length:
            found.append(tuple(ids[:length].tolist()))
        if len(found) == MOST_TEXTS:
            break
    if not found:
        raise ValueError(
            f"--text: no document of {length} tokens, the longest row of --lengths; the longest of "
            f"{len(sizes):,} has {max(sizes, default=0):,}. Give longer documents (books, or the "
            "files of a repository joined into one), or shorter --lengths."
        )
    return tuple(found)


def refusal(settings: EvalSettings) -> str | None:
    """Says why the processes would refuse, in words, as far as it is known without weights."""
    disable_progress_bars()
    checked = set[str]()
    try:
        for model in settings.models:
            config, tokenizer = config_of(model), models.load_tokenizer(model)
            models.check_vocabulary(tokenizer, config)
            if (place := model.tokenizer or model.model) in checked:
                continue
            checked.add(place)
            asked = settings.asked(model, tokenizer)
            if (problem := next(iter(asked.problems()), None)) is not None:
                return problem
            if problem := tasks_problem(asked, tokenizer):
                return problem
    except ValueError as error:
        return str(error)
    return None


def tasks_problem(asked: ContextEvaluation, tokenizer: Any, option: str = "--tasks") -> str | None:
    """Says of which tasks no sample can be made at some length, why, and which tasks can."""
    for task in asked.tasks:
        require_choice(option, task, [*TASKS, RULER])
    depths = asked.depths and asked.depths[:1]
    made = make_at_lengths(
        asked.tasks, tokenizer, asked.lengths, 1, asked.seed, depths, asked.sources
    )
    of_task: dict[str, str] = {}
    for task, samples in made:
        try:
            samples.result()
        except ValueError as error:
            of_task.setdefault(task, str(error).removeprefix(f"{task}: "))
    reasons: dict[str, list[str]] = {}
    for task, reason in of_task.items():
        reasons.setdefault(reason, []).append(task)
    if not reasons:
        return None
    lines = [f"{option} {','.join(tasks)}: {reason}" for reason, tasks in reasons.items()]
    fit = [task for task in asked.tasks if task not in of_task]
    return "\n".join([*lines, *[f"The others fit: {option} {','.join(fit)}"] * bool(fit)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate what a folder asks for; every process of the job runs this."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    folder = Path(words[0] if len(words) == 1 else "")
    if not (folder / ASKED_FILE).is_file():
        raise ValueError(
            f"{words}: give the folder that `longctx eval MODEL --dry-run` has written."
        )
    settings = EvalSettings.read(folder)
    quiet_libraries()
    accelerator = make_accelerator(parallelism_of(settings.models[0]))
    disable_progress_bar()  # a line says what is read
    disable_progress_bars()
    results = [result_of(model, settings, accelerator) for model in settings.models]
    for each in results[:-1]:  # the last is the one that others stand beside
        if each["vocabulary"] != results[-1]["vocabulary"]:
            each["notes"].append("has another tokenizer, so its losses don't compare")
    if accelerator.is_main_process:
        write_scores(folder, results)
    close_accelerator(accelerator)


def write_scores(folder: Path, models: Sequence[Mapping[str, Any]]) -> None:
    """Write what was found of each model, its `notes` and its `scores`."""
    text = json.dumps({"models": models}, allow_nan=False, indent=1) + "\n"
    write_whole(folder / SCORES_FILE, text.encode())


def result_of(model: Evaluated, settings: EvalSettings, accelerator: Any) -> dict[str, Any]:
    """Returns what scores.json says of a model. Collective."""
    say = partial(_say, accelerator)
    device = accelerator.device
    config, tokenizer = config_of(model), models.load_tokenizer(model)
    asked = settings.asked(model, tokenizer)
    model = with_dtype(model, config, on_cpu=device.type == "cpu")
    say(f"{model.label}: reading {model.adapter or model.model} in {model.dtype}")
    loaded = load(model, config, device, sharded=accelerator.is_fsdp2, say=say)
    handle = patch(loaded, parallelism_of(model))
    if accelerator.is_fsdp2:
        shard_frozen(accelerator, loaded)
    scores = evaluate_context(handle, tokenizer, asked, say=say)
    handle.unpatch()
    return {
        "model": f"{model.adapter} over {model.model}" if model.adapter else model.model,
        "notes": [*notes_of(model, config, max(settings.lengths))],
        "vocabulary": vocabulary_digest(tokenizer),
        "scores": scores.as_json(),
    }


def vocabulary_digest(tokenizer: Any) -> str:
    """Equal for tokenizers whose losses by token compare."""
    words = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def _say(accelerator: Any, text: str) -> None:
    """On stderr, with the seconds since the launch: stdout is for results."""
    if accelerator.is_main_process:
        print(f"[{time.time() - launched_at():5.1f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with one_message("evaluate"):
        main()
