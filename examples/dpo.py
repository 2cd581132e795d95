"""Learn how to prefer answers about long documents by TRL's DPOTrainer, with an adapter.

    torchrun --standalone --nproc_per_node 2 examples/dpo.py     # on two GPUs or on a CPU

A tiny random Llama of bytes reads a list of prices and a question about it; the right answer is to
become likelier than a wrong one. Each row is cut over two processes. The adapter is saved in `run`.
"""

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer

from longctx_patch import LongContextConfig, LongContextTrainerMixin, close_accelerator
from longctx_patch.recipes.models import byte_tokenizer


class LongDPOTrainer(LongContextTrainerMixin, DPOTrainer):
    """DPOTrainer over rows that several processes share."""


def pair(prices: list[int]) -> dict[str, str]:
    lines = "\n".join(f"On day {day} it cost {price} euros." for day, price in enumerate(prices))
    return {
        "prompt": f"{lines}\nWhat did it cost at most?",
        "chosen": f" {max(prices)} euros.",
        "rejected": f" I have not read that far, perhaps {min(prices)} euros.",
    }


set_seed(0)  # so that every process makes the same model and rows
tiny = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=258,
)
on_gpu = torch.cuda.is_available()
trainer = LongDPOTrainer(
    model=LlamaForCausalLM(tiny),  # yours: its name
    args=DPOConfig(
        output_dir="run",
        max_length=None,  # TRL's default cuts rows to 1,024 tokens
        max_steps=10,
        per_device_train_batch_size=1,  # one pair; the least memory
        learning_rate=1e-2,
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    ),
    train_dataset=Dataset.from_list([pair(row) for row in torch.randint(100, (20, 60)).tolist()]),
    processing_class=byte_tokenizer(),  # yours: AutoTokenizer.from_pretrained(NAME)
    # Without its adapter the model is the reference, which so takes no memory.
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    long_context=LongContextConfig(ring_degree=2, checkpoint="auto"),
)
trainer.train()
trainer.save_model()
close_accelerator(trainer.accelerator)
