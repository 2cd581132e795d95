"""Scores without generating are those of greedy decoding: `make real-model MODEL=folder`.

Each task that is scored so has 200 samples, on a pretrained model and one process. The answer's
parts that greedy decoding emits, in their order, are to be the score of forward passes. Samples
that differ are compared again in float32: rounding to bfloat16 decides between tokens that are
about as likely, and does so another way in rows of a batch. Beside them: RULER's own score of the
same text, which looks for the answers anywhere in it.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx_patch import LongContextConfig, patch
from longctx_patch.evaluation.row_scorer import RowScorer
from longctx_patch.evaluation.scoring import score_samples
from longctx_patch.evaluation.tasks import Sample, Sources, make_samples

NUM_SAMPLES = 200
BATCH = 20
TOKENS_AFTER = 8
"""Generated beyond the longest answer, for RULER's score."""
LENGTHS = {
    "passkey": 160,
    "niah_single_1": 384,
    "niah_single_2": 320,
    "niah_single_3": 384,
    "niah_multikey_1": 512,
    "niah_multikey_2": 384,
    "niah_multikey_3": 768,
    "vt": 1024,
}
"""Short ones: a CPU takes a second for 512 tokens."""
TEXT = Path(__file__).parents[2] / "docs" / "tutorial" / "your-own-loop.md"


class Scores(NamedTuple):
    forced: list[float]
    greedy: list[float]
    """Share of the answer's parts that greedy decoding emits, up to the first that it does not."""
    found: list[float]
    """Share of the answer's parts that are anywhere in what it emits: RULER's score."""


def compare(model: Any, tokenizer: Any, samples: Sequence[Sample]) -> Scores:
    """Scores of forced samples by the project's forward passes, and by transformers' `generate`."""
    emitted = [
        ids
        for first in range(0, len(samples), BATCH)
        for ids in greedy_ids(model, samples[first : first + BATCH])
    ]
    handle = patch(model, LongContextConfig())
    try:
        forced = score_samples(RowScorer(handle), samples)
    finally:
        handle.unpatch()
    greedy, found = [], []
    for sample, ids in zip(samples, emitted, strict=True):
        greedy.append(max(_share(ids, way) for way in (sample.answers, *sample.spellings)))
        text = tokenizer.decode(ids).lower()
        values = [tokenizer.decode(part).strip().lower() for part in sample.answers]
        found.append(sum(value in text for value in values) / len(values))
    return Scores(forced, greedy, found)


@torch.no_grad()
def greedy_ids(model: Any, samples: Sequence[Sample]) -> list[list[int]]:
    """What `generate` emits after each prompt, whatever it is: no token ends it."""
    longest = max(len(each.prompt) for each in samples)
    rows = [[0] * (longest - len(each.prompt)) + list(each.prompt) for each in samples]
    masks = [[0] * (longest - len(each.prompt)) + [1] * len(each.prompt) for each in samples]
    num_new = TOKENS_AFTER + max(each.num_tokens - len(each.prompt) for each in samples)
    model.generation_config.eos_token_id = None
    emitted = model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(masks, device=model.device),
        do_sample=False,
        max_new_tokens=num_new,
        pad_token_id=0,
    )
    found: list[list[int]] = emitted[:, longest:].tolist()
    return found


def _share(emitted: list[int], way: Sequence[Sequence[int]]) -> float:
    wanted: list[int] = []
    right = 0
    for part in way:
        wanted += part
        right += emitted[: len(wanted)] == wanted
    return right / len(way)


def main(folder: str, *tasks: str) -> int:
    """Ends with 1 if a score differs in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, num_wrong = _load(folder, "auto"), 0
    for task in tasks or LENGTHS:
        started = time.perf_counter()
        per_cell = NUM_SAMPLES // (5 if task == "passkey" else 1)
        samples = make_samples(
            [task], tokenizer, LENGTHS[task], per_cell, sources=Sources(text=TEXT.read_text())
        )
        scores = compare(model, tokenizer, samples)
        again = _that_differ(samples, scores)
        exact = _load(folder, torch.float32)
        wrong = again and _that_differ(again, compare(exact, tokenizer, again))
        num_wrong += len(wrong)
        means = " ".join(
            f"{name} {100 * sum(values) / len(values):.1f} %"
            for name, values in scores._asdict().items()
        )
        print(
            f"{task}, {LENGTHS[task]} tokens: {len(samples) - len(again)} of {len(samples)} equal, "
            f"{len(samples) - len(wrong)} with float32; {means} "
            f"({time.perf_counter() - started:.0f} s)",
            flush=True,
        )
    return int(num_wrong > 0)


def _load(folder: str, dtype: Any) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)


def _that_differ(samples: Sequence[Sample], scores: Scores) -> list[Sample]:
    pairs = zip(samples, scores.forced, scores.greedy, strict=True)
    return [sample for sample, forced, greedy in pairs if forced != greedy]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
