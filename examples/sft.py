"""TRL's SFTTrainer on chats, with each row cut over two processes.

    torchrun --standalone --nproc_per_node 2 examples/sft.py     # on two GPUs or on a CPU

A tiny random Llama learns the assistant's words of made-up chats, and is saved in the folder `run`
with its tokenizer.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from longctx_patch import LongContextConfig, LongContextTrainerMixin, close_accelerator


class LongSFTTrainer(LongContextTrainerMixin, SFTTrainer):
    """SFTTrainer over rows that several processes share."""


# `generation` says which words are the assistant's; TRL knows it of the usual templates.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} <end> "
    "{% else %}{% generation %}{{ m.content }} <end> {% endgeneration %}{% endif %}{% endfor %}"
)
WORDS = ["<pad>", "<end>", "<user>", *map(str, range(100))]

split = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
split.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=split, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
)
tiny = LlamaConfig(
    vocab_size=len(WORDS),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
chats = []
for first in range(40):
    numbers = [str(n % 100) for n in range(first, 2 * first + 50)]
    asked = {"role": "user", "content": " ".join(numbers)}
    answer = {"role": "assistant", "content": " ".join(reversed(numbers))}
    chats.append({"messages": [asked, answer]})

set_seed(0)
on_gpu = torch.cuda.is_available()
trainer = LongSFTTrainer(
    model=LlamaForCausalLM(tiny),  # or the name of one
    args=SFTConfig(
        output_dir="run",
        max_length=None,  # TRL's default cuts rows to 1,024 tokens
        max_steps=10,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        assistant_only_loss=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    ),
    train_dataset=Dataset.from_list(chats),
    processing_class=tokenizer,
    long_context=LongContextConfig(ring_degree=2, checkpoint="auto"),
)
trainer.train()
trainer.save_model()
close_accelerator(trainer.accelerator)
