"""Learn how to train long rows with transformers' Trainer.

    torchrun --standalone --nproc_per_node 2 examples/trainer.py     # on two GPUs or on a CPU

A tiny random Llama learns made-up rows, each cut over two processes, is evaluated on others, and is
saved in the folder `run`.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from longctx_patch import LongContextConfig, LongContextTrainer, close_accelerator

set_seed(0)  # so that every process makes the same rows
on_gpu = torch.cuda.is_available()
tiny = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(16, (40, 500))]

trainer = LongContextTrainer(
    model=LlamaForCausalLM(tiny),  # or AutoModelForCausalLM.from_pretrained(NAME, dtype="float32")
    args=TrainingArguments(
        output_dir="run",
        max_steps=10,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    ),
    train_dataset=rows[:32],
    eval_dataset=rows[32:],
    long_context=LongContextConfig(ring_degree=2, checkpoint="auto"),
)
trainer.train()
found = trainer.evaluate()  # on every process: they share each row
trainer.accelerator.print(found)  # on the main one
trainer.save_model()
close_accelerator(trainer.accelerator)  # on a CPU a process could else abort at its end
