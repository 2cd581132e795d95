"""The main job on any machine, CPU only: `make demo`, or `python examples/demo.py [FOLDER]`.

A small byte-level Llama is pretrained on Python's own library sources at 256 tokens, then patched
for 2,048 tokens with YaRN and LoRA-fine-tuned by `accelerate launch` with each sequence cut over
two processes. The same fine-tuning in one process must give the same loss and gradient norm in
every step, and the loss on files kept aside must fall. The last line starts with `demo: ok`;
anything else ends with exit code 1. FOLDER must be empty or new (default: a temporary folder).
"""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from longctx_patch.recipes.data.text_reading import TextReading
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.recipes.text_rows import joined_rows
from longctx_patch.recipes.text_sources import stream_of

SHORT, LONG = 256, 2048
PRETRAIN_STEPS, FINETUNE_STEPS = 300, 20
TRAIN_BYTES, HELD_OUT_ROWS = 4_000_000, 16
MAX_RELATIVE_ERROR, MIN_FALL = 1e-5, 0.02
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,  # bytes, <eos>, <pad>
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SHORT,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
    "tie_word_embeddings": True,
}
PRETRAIN = [
    *("--full", "--model", "model/config.json", "--text", "train.jsonl"),
    *("--seq-len", str(SHORT), "--batch-size", "16", "--max-steps", str(PRETRAIN_STEPS)),
    *("--learning-rate", "4e-3", "--warmup-steps", "20"),
]
FINETUNE = [
    *("--model", "pretrain/final", "--text", "train.jsonl", "--lora", "--lora-rank", "16"),
    *("--seq-len", str(LONG), "--rope", "yarn", "--max-steps", str(FINETUNE_STEPS)),
    *("--batch-size", "2", "--learning-rate", "2e-3", "--warmup-steps", "2"),
]


class DemoError(Exception):
    """The demo did not show what it promises."""


def main() -> None:
    started = time.monotonic()
    disable_progress_bar()
    # peft reads a property of transformers by its old name; users can't do anything about it.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
    folder = output_folder(sys.argv[1:])
    print(f"demo: everything is written to {folder}")
    write_corpus(folder)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL, indent=2))

    print(f"\n1. Pretrain at {SHORT} tokens, one process")
    recipe("pretrain", folder, PRETRAIN, processes=1)
    print(f"\n2. LoRA at {LONG} tokens with YaRN, each sequence over two processes")
    recipe("two", folder, [*FINETUNE, "--ring", "2"], processes=2)
    print("\n3. The same in one process")
    recipe("one", folder, FINETUNE, processes=1)

    error = compare(folder / "two", folder / "one")
    before, after = held_out_losses(folder)
    if not after < before * (1 - MIN_FALL):
        raise DemoError(f"held-out loss {before:.4f} -> {after:.4f}: it should fall by {MIN_FALL}")
    print(
        f"demo: ok  held-out loss at {LONG} tokens {before:.4f} -> {after:.4f}, two processes "
        f"against one: largest relative error {error:.1e}, {time.monotonic() - started:.0f} s"
    )


def output_folder(arguments: list[str]) -> Path:
    """The folder asked for, which must hold nothing, or a fresh temporary one."""
    if not arguments:
        return Path(tempfile.mkdtemp(prefix="longctx-demo-"))
    folder = Path(arguments[0]).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise DemoError(f"{folder} holds files: give an empty or new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_corpus(folder: Path) -> None:
    """Python's library, one file a line; every 20th file is kept aside."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    train: list[str] = []
    held_out: list[str] = []
    for number, path in enumerate(sorted(library.rglob("*.py"))):
        if skipped & set(path.relative_to(library).parts) or sum(map(len, train)) > TRAIN_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        (held_out if number % 20 == 0 else train).append(text)
    for name, texts in (("train", train), ("held_out", held_out)):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(texts)} files, {sum(map(len, texts)):,} characters of {library}")


def recipe(name: str, folder: Path, flags: list[str], *, processes: int) -> None:
    """Run the fine-tuning recipe in `folder` as a user would; its output goes to `name`."""
    command = [sys.executable, "-m"]
    # Two processes share the cores; one may use them all. GPUs are left alone.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if processes > 1:
        yaml = files("longctx_patch.recipes") / "accelerate" / "cpu_2_processes.yaml"
        command += ["accelerate.commands.launch", "--config_file", str(yaml)]
        command += ["--main_process_port", "0", "-m"]  # any free port
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // processes))
    command += ["longctx_patch.recipes.finetune", *flags, "--output", name]
    print(f"$ cd {folder}\n$ {shlex.join(command)}", flush=True)
    done = subprocess.run(command, cwd=folder, env=environment)
    if done.returncode:
        raise DemoError(f"the command above ended with exit code {done.returncode}")


def compare(ours: Path, reference: Path) -> float:
    """Largest relative error of loss and gradient norm over all steps."""
    worst = 0.0
    print("\n4. Two processes against one\nstep   loss, two    loss, one    rel err  grad norm err")
    for two, one in zip(read_metrics(ours), read_metrics(reference), strict=True):
        errors = [abs(two[key] / one[key] - 1) for key in ("loss", "grad_norm")]
        print(f"{two['step']:4d}  {two['loss']:.8f}  {one['loss']:.8f}  {errors[0]:.1e}  ", end="")
        print(f"{errors[1]:.1e}")
        worst = max(worst, *errors)
    if not worst < MAX_RELATIVE_ERROR:
        raise DemoError(f"relative error {worst:.1e} is not below {MAX_RELATIVE_ERROR:.0e}")
    return worst


def held_out_losses(folder: Path) -> tuple[float, float]:
    """Loss on the files kept aside, before and after tuning, by transformers and peft alone."""
    from peft import PeftModel  # after the recipes, which hide what its packages log on import

    final = folder / "two" / "final"
    config = AutoConfig.from_pretrained(final)  # carries the YaRN change
    base = AutoModelForCausalLM.from_pretrained(folder / "pretrain" / "final", config=config)
    reading = TextReading(AutoTokenizer.from_pretrained(final))
    rows = joined_rows(stream_of([str(folder / "held_out.jsonl")], reading), LONG)
    held_out = [rows[number]["input_ids"] for number in range(min(HELD_OUT_ROWS, len(rows)))]
    before = mean_loss(base, held_out)
    return before, mean_loss(PeftModel.from_pretrained(base, str(final)), held_out)


@torch.inference_mode()
def mean_loss(model: torch.nn.Module, rows: list[list[int]]) -> float:
    """The mean loss of rows that all have one length."""
    batches = [torch.tensor(row)[None] for row in rows]
    losses = [model.eval()(input_ids=ids, labels=ids).loss.item() for ids in batches]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    try:
        main()
    except DemoError as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        sys.exit(1)
