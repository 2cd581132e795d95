#!/bin/bash
# Learn how to train on two machines of a Slurm cluster, and go on after the time limit.
#
#     sbatch examples/slurm.sh     # and the same again, after a stop
#
# The first job writes a run folder, which all machines have to see. Its own slurm.sh starts
# `accelerate launch` on each of them; what follows it are settings of the recipe.
# Change the lines below, and add what your cluster asks for (account, partition).
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# Five minutes before that, the processes save and end.
#SBATCH --signal=USR1@300
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-8B} DATA=${DATA:-books.jsonl} RUN=${RUN:-run}

if [ ! -e "$RUN" ]; then
    longctx patch "$MODEL" --seq-len 128K --rope yarn --data "$DATA" \
        --nodes 2 --gpus 16xH200 --out "$RUN"
fi
bash "$RUN/slurm.sh" "$RUN" --max-steps 1000 --resume auto
