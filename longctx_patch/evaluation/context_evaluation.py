"""One call that shows whether a patched model uses a long context, in any loop."""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from statistics import fmean
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from longctx_patch.evaluation.longppl import CONTEXT, LongPPL, long_ppl, short_log_probs
from longctx_patch.evaluation.positions import (
    PositionLosses,
    default_edges,
    edge_problem,
    loss_by_position,
)
from longctx_patch.evaluation.row_scorer import LabelScores, RowScorer, batch_of
from longctx_patch.evaluation.scores import Cell, ContextScores, TaskScores, in_k
from longctx_patch.evaluation.scoring import sample_problems, score_samples
from longctx_patch.evaluation.tasks.make import haystacks, make_at_lengths
from longctx_patch.evaluation.tasks.materials import Sources
from longctx_patch.evaluation.tasks.sample import Sample
from longctx_patch.families.rope_facts import reach_problem
from longctx_patch.health.agreement import require_agreement
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.hf.call.inputs import vocabulary_problem
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.rules.together import of_all_ranks, own_rank, refuse_together

Text = str | Sequence[int]
"""A document, or its token ids."""
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class ContextEvaluation:
    """Says what is to be evaluated, the same on every rank."""

    lengths: tuple[int, ...]
    """Tokens of the rows: of tasks at each of them, of texts at the greatest."""
    texts: tuple[Text, ...] = ()
    """Documents for losses by position and LongPPL. Those of the greatest length or more count,
    each with its beginning; at least one has to be as long."""
    edges: tuple[int, ...] = ()
    """Positions between which losses are averaged; none: 0, 1K, 4K, 8K and so on, doubling."""
    longppl: bool = False
    """Whether LongPPL of the texts is computed, which takes 5 more tokens for each of theirs, in
    rows of 5,120."""
    tasks: tuple[str, ...] = ()
    """Names of tasks: `passkey`, and RULER's."""
    sources: Sources = field(default_factory=Sources)
    """Files that tasks are made of."""
    depths: tuple[float, ...] | None = None
    """Where tasks with one needle hide it, from 0 to 1; None: as each task does by itself."""
    samples: int = 10
    """How many each task has at each length and depth."""
    seed: int = 42
    own: tuple[Sample, ...] = ()
    """Samples that are made already, such as `read_questions` makes of the user's own."""
    label: str = ""
    """What is evaluated, in the words of the tables."""

    @property
    def reach(self) -> int:
        """The greatest length."""
        return max(self.lengths)

    def problems(self) -> Iterable[str]:
        """Says what is wrong with it, whatever the model, in words."""
        if not self.lengths or any(length < 2 for length in self.lengths):
            yield f"lengths={self.lengths}: give one or more, of 2 tokens or more each."
        if not (self.texts or self.tasks or self.own):
            yield (
                "there is nothing to evaluate: give texts (`longctx eval --text FILE`), tasks "
                "(--tasks passkey) or your own samples (--questions FILE)."
            )
        if self.edges and (problem := edge_problem(self.edges)):
            yield problem
        if self.longppl and (not self.texts or self.reach <= CONTEXT):
            yield (
                f"longppl=True with {len(self.texts)} texts and lengths={self.lengths}: LongPPL "
                f"compares predictions after a long text with those after {CONTEXT:,} tokens. Give "
                f"texts and a length above {CONTEXT:,}, or leave it out."
            )


def evaluate_context(
    handle: PatchHandle,
    tokenizer: Any,
    asked: ContextEvaluation,
    *,
    model: nn.Module | None = None,
    key_handle: PatchHandle | None = None,
    watchdog: Watchdog | None = None,
    say: Callable[[str], None] = print,
) -> ContextScores:
    """Evaluate a patched model at any length, over the ranks that it is patched for.

    Collective over the world: all ranks call it with the same model and what is asked, in training
    or not. Rows are spread over the sequence groups, the ranks of a group share each, and every
    rank gets all scores, those of one process. The model is in evaluation mode meanwhile, and then
    in the mode that it was in; weights, gradients and random numbers stay as they are. Adapters
    count as they are switched: `with model.disable_adapter():` evaluates the base.

    Args:
        handle: of the model.
        tokenizer: the model's, for texts and tasks.
        model: the module that the loop trains, where it wraps the patched model: that of FSDP2
            around PEFT, or a compiled one. None: the patched model itself.
        key_handle: of the model that finds LongPPL's key tokens, with the same tokenizer. None: the
            model itself.
        watchdog: that of the training around this, which is told of each batch.
        say: gets a line for each part, on the first rank.

    Raises:
        ValueError: on all ranks, before anything is computed: they ask for different things, no
            text is as long, a length is beyond the model's reach, an answer doesn't fit, the model
            isn't patched. Later, for log-probabilities that are not finite.

    Example:
        >>> asked = ContextEvaluation(lengths=(8192, 65536), tasks=("passkey",))
        >>> print(evaluate_context(handle, tokenizer, asked))  # doctest: +SKIP
    """
    prepared = PreparedEvaluation(handle, tokenizer, asked, key_handle)
    return prepared.run(model, watchdog=watchdog, say=say)


class PreparedEvaluation:
    """Holds what is asked, checked and made into rows, to be run at several times of a training."""

    def __init__(
        self,
        handle: PatchHandle,
        tokenizer: Any,
        asked: ContextEvaluation,
        key_handle: PatchHandle | None = None,
    ) -> None:
        """Collective over the world; raises as `evaluate_context` does before it computes."""
        require_agreement(_on_all_ranks(lambda: _facts(asked)), "what to evaluate")
        self._handle, self._asked, self._key_handle = handle, asked, key_handle
        for each in filter(None, (handle, key_handle)):
            refuse_together(_problems(each, tokenizer, asked))
        self._texts, self._samples, self._haystacks = _on_all_ranks(
            lambda: (
                _long_texts(tokenizer, asked),
                _samples(tokenizer, asked),
                haystacks(asked.tasks, asked.sources),
            )
        )
        for each in filter(None, (handle, key_handle)):
            refuse_together(filter(None, [vocabulary_problem(each.model, *self._ids())]))

    def _ids(self) -> tuple[int, int]:
        """The least and the greatest token id of all rows."""
        found = [int(edge) for text in self._texts for edge in text.aminmax()]
        for samples in self._samples.values():
            for sample in samples:
                ways = [sample.answers, sample.others, *sample.spellings]
                rows = [sample.prompt, *(part for way in ways for part in way)]
                found += [edge(row) for row in rows for edge in (min, max)]
        return min(found), max(found)

    def run(
        self,
        model: nn.Module | None = None,
        *,
        watchdog: Watchdog | None = None,
        say: Callable[[str], None] = print,
    ) -> ContextScores:
        """The scores of the model as it is now. Collective; arguments as `evaluate_context`'s."""
        started = time.perf_counter()
        asked, scorer = self._asked, RowScorer(self._handle, model, watchdog)
        say = say if own_rank() == 0 else _nothing
        losses, ppl = None, None
        if self._texts:
            say(f"losses by position of {len(self._texts)} texts of {in_k(asked.reach)} tokens")
            keys = scorer
            if self._key_handle is not None:
                keys = RowScorer(self._key_handle, watchdog=watchdog)
            losses, ppl = _of_texts(scorer, self._texts, asked, keys)
        tasks = {}
        for name, samples in self._samples.items():
            lengths = sorted({sample.length for sample in samples})
            say(f"{name}: {len(samples)} samples of {', '.join(map(in_k, lengths))} tokens")
            scores = score_samples(scorer, samples)
            haystack, is_own = self._haystacks.get(name), name not in asked.tasks
            tasks[name] = _task_scores(samples, scores, haystack, is_own=is_own)
        if watchdog is not None:
            watchdog.enter("step")
        return ContextScores(
            label=asked.label,
            lengths=asked.lengths,
            loss_by_position=losses,
            longppl=ppl,
            tasks=tasks,
            seed=asked.seed,
            tokens=scorer.tokens,
            seconds=max(of_all_ranks(round(time.perf_counter() - started, 3))),
        )


def _of_texts(
    scorer: RowScorer, texts: Sequence[Tensor], asked: ContextEvaluation, keys: RowScorer
) -> tuple[PositionLosses, LongPPL | None]:
    batches = [batch_of([text]) for text in texts]
    long = scorer.over(batches, _log_probs)
    edges = asked.edges or default_edges(asked.reach)
    losses = loss_by_position(batches, long, edges)
    if not asked.longppl:
        return losses, None
    theirs = long if keys is scorer else keys.over(batches, _log_probs)
    mine, theirs = ([logs[0] for logs in found] for found in (long, theirs))
    return losses, long_ppl(mine, theirs, short_log_probs(keys, texts))


def _log_probs(_: int, scores: LabelScores) -> Tensor:
    return scores.log_probs


def _problems(handle: PatchHandle, tokenizer: Any, asked: ContextEvaluation) -> Iterable[str]:
    """Says why this can't be evaluated, in words."""
    if not handle.is_patched:
        yield "the handle's model is not patched any more: evaluate before handle.unpatch()."
    yield from asked.problems()
    has_words = any(isinstance(text, str) for text in asked.texts)
    if tokenizer is None and (has_words or asked.tasks):
        yield "tokenizer=None: tasks, and texts that are no token ids, need the model's own."
    config = handle.model.config
    longest = max(*asked.lengths, *(sample.num_tokens for sample in asked.own), 0)
    if not handle.config.allow_beyond_reach and (problem := reach_problem(config, longest)):
        yield problem


def _long_texts(tokenizer: Any, asked: ContextEvaluation) -> list[Tensor]:
    """The beginnings of the texts that are long enough, `[asked.reach]` each."""
    longest, found = 0, []
    for text in asked.texts:
        ids = tokenizer(text)["input_ids"] if isinstance(text, str) else text
        longest = max(longest, len(ids))
        if len(ids) >= asked.reach:
            found.append(torch.as_tensor(ids[: asked.reach], dtype=torch.int64))
    if asked.texts and not found:
        raise ValueError(
            f"no text has {asked.reach} tokens: the longest of {len(asked.texts)} has {longest}. "
            "Give longer texts, or smaller lengths."
        )
    return found


def _samples(tokenizer: Any, asked: ContextEvaluation) -> dict[str, list[Sample]]:
    """Samples of each task, of all lengths. Their prompts take 4 bytes a token, not 40."""
    found: dict[str, list[Sample]] = {name: [] for name in asked.tasks}
    for _, made in make_at_lengths(
        *(asked.tasks, tokenizer, asked.lengths, asked.samples),
        *(asked.seed, asked.depths, asked.sources),
    ):
        _add(made.result(), found)
    _add(asked.own, found)
    return found


def _add(made: Sequence[Sample], found: dict[str, list[Sample]]) -> None:
    for problem in sample_problems(made):
        raise ValueError(problem)
    ways = Counter(task for task, _ in {(sample.task, sample.scoring) for sample in made})
    for sample in made:
        name = f"{sample.task}_{sample.scoring}" if ways[sample.task] > 1 else sample.task
        samples = found.setdefault(name, [])
        samples.append(replace(sample, prompt=array("i", sample.prompt)))


def _task_scores(
    samples: Sequence[Sample], scores: Sequence[float], haystack: str | None, *, is_own: bool
) -> TaskScores:
    """The means of a task's samples by length and depth."""
    by_cell: dict[tuple[int, float | None], list[float]] = {}
    for sample, score in zip(samples, scores, strict=True):
        by_cell.setdefault((sample.length, sample.depth), []).append(score)
    cells = [
        Cell(length=length, depth=depth, score=fmean(values), samples=len(values))
        for (length, depth), values in by_cell.items()
    ]
    if is_own:
        note = f"of {max(sample.num_tokens for sample in samples):,} tokens at most"
    else:
        note = f"haystack: {haystack}" if haystack else ""
    return TaskScores(scoring=samples[0].scoring, cells=tuple(cells), note=note)


def _on_all_ranks(make: Callable[[], Made]) -> Made:
    """What `make` returns; what it refuses on one rank is refused on all. Collective."""
    made, problem = None, []
    try:
        made = make()
    except ValueError as error:
        problem = [str(error)]
    except Exception as error:  # whatever it is, the other ranks must learn of it, not wait
        problem = [f"what is asked for can't be prepared: {error!r}"]
    refuse_together(problem)
    return cast(Made, made)


def _facts(asked: ContextEvaluation) -> dict[str, Any]:
    """Returns what is asked, with the number and a digest of the texts, the haystack among them."""
    facts = {each.name: getattr(asked, each.name) for each in fields(asked)}
    texts, own = facts.pop("texts"), facts.pop("own")
    digest = blake2b(repr((own, asked.sources.text)).encode(), digest_size=8)
    for text in texts:
        digest.update(text.encode() if isinstance(text, str) else repr(list(text)).encode())
    number = f"{len(texts)} and {len(own)} with the digest {digest.hexdigest()}"
    return facts | {"texts and samples": number}


def _nothing(_: str) -> None:
    """Says nothing, on all ranks but the first."""
