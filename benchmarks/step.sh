#!/usr/bin/env bash
# One training step at 131,072 tokens on the GPUs of one machine: the recipe and, before it in the
# same run, Accelerate's own context parallelism. Writes JSON lines of both into a folder.
#
#   benchmarks/step.sh RESULTS [LAYERS] [recipe flags, default: --ulysses GPUS --checkpoint attention]
#
# The model has Llama-3.1-8B's shape with LAYERS layers (32) and random weights; the recipe's text is
# Python's standard library, read as bytes.
set -euo pipefail
results=$(mkdir -p "$1" && cd "$1" && pwd)
layers=${2:-32}
shift $(($# < 2 ? $# : 2))
here=$(cd "$(dirname "$0")" && pwd)
gpus=$(nvidia-smi -L | wc -l)
flags=("$@")
if [ ${#flags[@]} -eq 0 ]; then flags=(--ulysses "$gpus" --checkpoint attention); fi

python3 - "$results" "$layers" "$gpus" <<'PY'
import json, pathlib, sys, sysconfig
from longctx_patch.plugin import accelerate_yaml

results, layers, gpus = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": layers, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257, "tie_word_embeddings": False,
}
(results / "config.json").write_text(json.dumps(config))
(results / "fsdp2.yaml").write_text(accelerate_yaml(gpus, gpus, fsdp=True))
with (results / "text.jsonl").open("w") as file:
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        file.write(json.dumps({"text": path.read_text(errors="ignore")}) + "\n")
PY

torchrun --nproc_per_node "$gpus" "$here/accelerate_context_parallel.py" "$results/config.json" \
    --seq-len 131072 | grep '^{' | tee "$results/accelerate.jsonl"
accelerate launch --config_file "$results/fsdp2.yaml" -m longctx_patch.recipes.finetune \
    --full --dtype bfloat16 --model "$results/config.json" --text "$results/text.jsonl" \
    --seq-len 131072 --learning-rate 1e-5 --max-steps 4 --output "$results/run" "${flags[@]}"
cat "$results/run/metrics.jsonl"
