"""Learn how to fine-tune on long chats with tools by TRL's SFTTrainer.

    torchrun --standalone --nproc_per_node 2 examples/sft.py     # on two GPUs or on a CPU

A tiny random Llama of bytes reads long lists of prices, and learns to call a tool with two of them
and to say what the tool returns. Each chat is cut over two processes. The model is saved in `run`.
"""

import json

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.utils import get_json_schema
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import qwen2_5_chat_template

from longctx_patch import LongContextConfig, LongContextTrainerMixin, close_accelerator
from longctx_patch.recipes.models import byte_tokenizer


class LongSFTTrainer(LongContextTrainerMixin, SFTTrainer):
    """SFTTrainer over rows that several processes share."""


def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: The first number.
        y: The second number.
    """
    return x + y


def chat(prices: list[int]) -> dict[str, object]:
    asked = {"x": prices[0], "y": prices[-1]}
    call = {"type": "function", "function": {"name": "add", "arguments": asked}}
    messages = [
        {"role": "user", "content": f"What do the first and the last cost together? {prices}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(add(**asked))},
        {"role": "assistant", "content": f"{add(**asked)} euros."},
    ]
    return {"messages": messages, "tools": json.dumps([get_json_schema(add)])}


tokenizer = byte_tokenizer()  # yours: AutoTokenizer.from_pretrained(NAME), which has a template
tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
tokenizer.chat_template = qwen2_5_chat_template
set_seed(0)  # so that every process makes the same model and rows
tiny = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=259,
)
on_gpu = torch.cuda.is_available()
trainer = LongSFTTrainer(
    model=LlamaForCausalLM(tiny),  # yours: its name
    args=SFTConfig(
        output_dir="run",
        max_length=None,  # TRL's default cuts rows to 1,024 tokens
        max_steps=10,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        logging_steps=1,
        assistant_only_loss=True,  # calls and answers are learned, nothing else
        bf16=on_gpu,
        use_cpu=not on_gpu,
    ),
    train_dataset=Dataset.from_list([chat(row) for row in torch.randint(100, (40, 100)).tolist()]),
    processing_class=tokenizer,
    long_context=LongContextConfig(ring_degree=2, checkpoint="auto"),
)
trainer.train()
trainer.save_model()
close_accelerator(trainer.accelerator)
