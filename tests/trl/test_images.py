"""TRL's trainers on chats with pictures, over several ranks per sequence: they log and learn what
the same trainers do with the stock model on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Image, List
from peft import LoraConfig
from PIL import Image as Picture
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from longctx_patch import LongContextConfig, LongContextTrainerMixin
from tests.hf.seeing import END, IMAGE, START, VIDEO, seeing_model
from tests.hf.tiny import VOCABULARY
from tests.plugin.launched import run_launched
from tests.trainer.trained import Trained, complaints
from tests.trl.cases import TRAINERS, USUAL, Case, moved, train

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")

TOKENS = {
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
    "<|vision_start|>": START,
    "<|vision_end|>": END,
}
CHAT = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif m.role == 'assistant' %}"
    "{% generation %} {{ part.text }} <eos>{% endgeneration %}{% else %} {{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


class PictureProcessor(Qwen3VLProcessor):
    """Qwen3-VL's without videos, which need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **_: Any) -> None:
        self.image_token, self.image_token_id = "<|image_pad|>", IMAGE
        self.video_token, self.video_token_id = "<|video_pad|>", VIDEO
        super(Qwen3VLProcessor, self).__init__(image_processor, tokenizer, chat_template=CHAT)


def processor() -> Any:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(3, VOCABULARY))]
    for token, number in TOKENS.items():
        words[number] = token
    model = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[*TOKENS],
    )
    pictures = Qwen2VLImageProcessorPil(
        patch_size=2, temporal_patch_size=2, merge_size=2, min_pixels=16, max_pixels=96
    )
    return PictureProcessor(pictures, tokenizer)


def chats(trainer: str, number: int, seed: int) -> Dataset:
    """Questions about one or two pictures, and answers to them, in the form of a trainer's rows."""
    draw = torch.Generator().manual_seed(seed)

    def among(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    def said(role: str) -> dict[str, str]:
        words = (f"w{among(3, IMAGE)}" for _ in range(among(2, 12)))
        return {"role": role, "content": " ".join(words)}

    def picture() -> Any:
        shape = 4 * among(1, 4), 4 * among(1, 3), 3
        return Picture.fromarray(torch.randint(256, shape, generator=draw).to(torch.uint8).numpy())

    rows = []
    for index in range(number):
        asked, *answers = said("user"), said("assistant"), said("assistant")
        forms: dict[str, dict[str, Any]] = {
            "sft": {"messages": [asked, answers[0], said("user"), answers[1]]},
            "dpo": {"prompt": [asked], "chosen": answers[:1], "rejected": answers[1:]},
            "kto": {"prompt": [asked], "completion": answers[:1], "label": index % 3 > 0},
        }
        rows.append(forms[trainer] | {"images": [picture() for _ in range(among(1, 3))]})
    return Dataset.from_list(rows).cast_column("images", List(Image()))


RING: dict[str, Any] = {"ring_degree": 2, "checkpoint": "attention"}
SHORT: dict[str, Any] = {"max_length": None}
LEARNED = {"assistant_only_loss": True, "gradient_accumulation_steps": 2}
RUNS = [
    Case("sft", "sft", "", RING, arguments=SHORT | LEARNED),
    Case("dpo", "dpo", "", RING, arguments=SHORT),
    Case("kto", "kto", "", {"ulysses_degree": 2}, arguments=SHORT),
]


def train_run(case: Case, folder: str, is_patched: bool) -> Trained:
    given: dict[str, Any] = {"model": seeing_model("qwen3_vl"), "processing_class": processor()}
    if case.trainer == "kto":
        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    elif case.trainer == "dpo":
        given["ref_model"] = moved(seeing_model("qwen3_vl"))
    given["train_dataset"] = chats(case.trainer, 16, seed=1)
    given["eval_dataset"] = chats(case.trainer, 5, seed=2)
    return train(case, Path(folder) / case.name, is_patched, **given)


def train_all(folder: str, is_patched: bool) -> list[Trained]:
    return [train_run(case, folder, is_patched) for case in RUNS]


def test_two_ranks_learn_from_pictures_as_one(tmp_path: Path) -> None:
    (one,) = run_launched(train_all, 1, str(tmp_path / "one"), False)
    for of_rank in run_launched(train_all, 2, str(tmp_path / "two"), True):
        for case, found, wanted in zip(RUNS, of_rank, one, strict=True):
            wrong = complaints(found, wanted)
            assert not wrong, "\n".join([case.name, *wrong])
            learned = [n for n, w in found.weights.items() if "lora_B" in n and w.any()]
            if case.trainer != "kto":
                before = seeing_model("qwen3_vl").state_dict()
                learned = [n for n, w in found.weights.items() if not torch.equal(w, before[n])]
            assert any(".visual." in name for name in learned)


def test_trainers_that_generate_are_refused(tmp_path: Path) -> None:
    arguments, cls = TRAINERS["grpo"]
    with pytest.raises(ValueError, match=r"GRPOTrainer with Qwen3VLFor.*which reads images"):
        type("Patched", (LongContextTrainerMixin, cls), {})(
            model=seeing_model("qwen3_vl"),
            args=arguments(output_dir=str(tmp_path), num_generations=2, **USUAL),
            train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * 4),
            processing_class=processor(),
            reward_funcs=lambda **_: 0.0,
            long_context=LongContextConfig(),
        )
