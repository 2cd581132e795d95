"""Long texts have the tokens that they have when they are tokenised at once."""

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from longctx_patch.recipes.data import windows
from longctx_patch.recipes.data.windows import ids_of_text, tokens_of_text

random = np.random.default_rng(3)
WORDS = [
    "the",
    "Größe",
    "naïve",
    "日本語",
    "🙂👩‍👩‍👧",
    "x1234567",
    "  ",
    "\n\n",
    "\t",
    "don't",
    "--",
    "<end>",
    "é",
]
TEXTS = {
    "words": " ".join(random.choice(WORDS, 3000)),
    "no spaces": "".join(random.choice(WORDS, 3000)),
    "one letter": "a" * 5000,
    "digits": "9081726354" * 400,
    "spaces": "w" + " " * 4000 + "w" * 1000,
    "lines": "\n".join(" " * (n % 13) + "line" * (n % 5) for n in range(900)),
}


def trained(model: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of the forms that models on the hub have."""
    if model == "bytes":
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<end>"],
            show_progress=False,
        )
    elif model == "unsplit":  # as of SentencePiece's BPE: no word ends a merge
        found = Tokenizer(models.BPE(unk_token="<unk>"))
        found.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<unk>", "<end>"], show_progress=False
        )
    else:
        found = Tokenizer(models.Unigram())
        found.normalizer = normalizers.NFKC()
        found.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300,
            unk_token="<unk>",
            special_tokens=["<unk>", "<end>"],
            show_progress=False,
        )
    found.train_from_iterator(TEXTS["words"].split("\n"), trainer)
    found.post_processor = processors.TemplateProcessing(
        single="<end> $A <end>", special_tokens=[("<end>", found.token_to_id("<end>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<end>")


@pytest.mark.parametrize("model", ["bytes", "unsplit", "unigram"])
def test_windows_have_the_tokens_of_the_whole(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where windows never agree, as of a text without any word's end."""
    tokenizer = trained(model)
    monkeypatch.setattr(windows, "NUM_AGREEING", 8)
    for name, text in TEXTS.items():
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for window, overlap in ((211, 101), (1000, 307)):
            monkeypatch.setattr(windows, "WINDOW", window)
            monkeypatch.setattr(windows, "OVERLAP", overlap)
            found = tokens_of_text(text, tokenizer)
            assert found.ids.tolist() == whole["input_ids"], (name, window)
            assert found.offsets.tolist() == [[*each] for each in whole["offset_mapping"]], name
            for special in (False, True):
                wanted = tokenizer(text, add_special_tokens=special)["input_ids"]
                assert ids_of_text(text, tokenizer, special=special) == wanted
