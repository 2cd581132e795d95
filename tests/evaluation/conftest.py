"""Tokenizers of the forms that models have, made here."""

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from longctx_patch.evaluation.tasks.materials import NOISE

WORDS = f"{NOISE} One of the special magic numbers for is: VAR 1234567890 = Answer: Question? " * 3


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2 and Llama 3 have it."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(WORDS.split("\n"), trainer)
    found.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found)


@pytest.fixture(scope="session")
def joining_tokenizer() -> PreTrainedTokenizerFast:
    """BPE that joins spaces with what is before and after, and begins each row, as Llama 2 does."""
    found = Tokenizer(models.BPE(unk_token="<unk>"))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>"], show_progress=False
    )
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    found.train_from_iterator([WORDS, f"they are:  {alphabet}   {alphabet}"], trainer)
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", found.token_to_id("<s>"))]
    )
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", unk_token="<unk>")
