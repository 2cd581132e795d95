"""Learn how to extend a model's context, and how to evaluate it before and after.

    torchrun --standalone --nproc_per_node 2 examples/extend.py     # on two GPUs or on a CPU

A tiny random Llama, made for 64 tokens, is trained on rows of 512, each cut over two processes. The
table has its losses by position: if they rise beyond the old reach, train longer.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from longctx_patch import (
    ContextEvaluation,
    ContextScores,
    LongContextConfig,
    LongContextTrainer,
    close_accelerator,
    compare_scores,
    evaluate_context,
    scale_rope,
)

SHORT, LONG = 64, 512

set_seed(0)  # so that every process makes the same model and rows
tiny = LlamaConfig(  # yours: AutoConfig.from_pretrained(NAME)
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=100,
    max_position_embeddings=SHORT,
)
config = scale_rope(tiny, kind="theta", target_length=LONG)
model = LlamaForCausalLM(config)  # yours: from_pretrained(NAME, config=config, dtype="float32")
rows = (torch.randint(100, (48, 1)) + 7 * torch.arange(LONG)) % 100
on_gpu = torch.cuda.is_available()
trainer = LongContextTrainer(
    model=model,
    args=TrainingArguments(
        output_dir="run",
        max_steps=20,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows[:40]],
    long_context=LongContextConfig(ring_degree=2, checkpoint="auto"),
)


def evaluate(label: str) -> ContextScores:
    """Every process calls it. `tasks=("passkey",)` would ask for what lies far back, too."""
    asked = ContextEvaluation(
        lengths=(LONG,),
        texts=tuple(rows[40:].tolist()),  # or words, with a tokenizer in place of None
        edges=(0, SHORT, 2 * SHORT, LONG),
        label=label,
    )
    return evaluate_context(trainer.long_context_handle, None, asked)


before = evaluate("before")
trainer.train()
after = evaluate("after")
trainer.accelerator.print(compare_scores([before, after]))
trainer.save_model()  # its config.json has the new RoPE
close_accelerator(trainer.accelerator)
