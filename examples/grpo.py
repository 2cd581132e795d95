"""Learn how to train with a reward on long prompts by TRL's GRPOTrainer.

    torchrun --standalone --nproc_per_node 2 examples/grpo.py     # on two GPUs or on a CPU

A tiny random Llama of bytes reads a list of prices, writes 8 bytes, and is rewarded for ASCII. Each
prompt, with what was written, is cut over two processes. The model is saved in `run`.
"""

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from longctx_patch import LongContextConfig, LongContextTrainerMixin, close_accelerator
from longctx_patch.recipes.models import byte_tokenizer


class LongGRPOTrainer(LongContextTrainerMixin, GRPOTrainer):
    """GRPOTrainer over rows that several processes share."""


def share_of_ascii(completions: list[str], **_columns: object) -> list[float]:
    """The reward. Every process calls it; what the first one finds counts."""
    return [sum(letter.isascii() for letter in text) / 8 for text in completions]


set_seed(0)  # so that every process makes the same model and rows
tiny = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=258,
)
lists = torch.randint(100, (20, 100)).tolist()
rows = [{"prompt": f"What do these prices add up to? {prices}"} for prices in lists]
on_gpu = torch.cuda.is_available()
trainer = LongGRPOTrainer(
    model=LlamaForCausalLM(tiny),  # yours: its name
    reward_funcs=share_of_ascii,
    args=GRPOConfig(
        output_dir="run",
        max_steps=10,
        per_device_train_batch_size=8,  # completions, each on both processes
        num_generations=8,  # of each prompt
        steps_per_generation=1,
        max_completion_length=8,
        learning_rate=3e-2,
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=byte_tokenizer(),  # yours: AutoTokenizer.from_pretrained(NAME)
    long_context=LongContextConfig(ring_degree=2, checkpoint="auto"),
)
trainer.train()
trainer.save_model()
close_accelerator(trainer.accelerator)
