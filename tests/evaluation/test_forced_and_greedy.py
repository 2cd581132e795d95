"""Scores without generating are those of greedy decoding, where a tiny model is right and wrong."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longctx_patch.evaluation.tasks import Sample, make_samples
from tests.evaluation.forced_and_greedy import compare, greedy_ids
from tests.tiny_llama import TINY_LLAMA


def as_emitted(samples: Sequence[Sample], emitted: Sequence[Sequence[int]]) -> list[Sample]:
    """Samples whose first parts are what the model emits: none, one, ... all of them; every other
    one with a spelling that it does not emit before."""
    made = []
    for number, (sample, ids) in enumerate(zip(samples, emitted, strict=True)):
        parts, place = [], 0
        for part in sample.answers:
            parts.append(tuple(ids[place : place + len(part)]))
            place += len(part)
        num_right = number % (len(parts) + 1)
        way = (*parts[:num_right], *sample.answers[num_right:])
        made.append(
            replace(sample, spellings=(way,))
            if number % 2
            else replace(sample, answers=way, spellings=(sample.answers,))
        )
    return made


def test_forward_passes_score_what_greedy_decoding_emits(tokenizer: Any) -> None:
    torch.manual_seed(5)
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA | settings | {"eos_token_id": None})).eval()
    for task, length, per_cell in (("passkey", 170, 1), ("vt", 1100, 6)):
        samples = make_samples([task], tokenizer, length, per_cell)
        num_parts = len(samples[0].answers)
        made = as_emitted(samples, greedy_ids(model, samples))
        scores = compare(model, tokenizer, samples + made)
        assert scores.forced == scores.greedy
        assert scores.forced[: len(samples)] == [0] * len(samples)
        assert set(scores.forced) == {n / num_parts for n in range(num_parts + 1)}
