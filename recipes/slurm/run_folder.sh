#!/bin/bash
# Trains a run folder of `longctx patch --nodes N` under Slurm. All machines must see the folder.
#
#   sbatch --nodes 2 --gpus-per-node 8 RUN/slurm.sh RUN [settings, such as --max-steps 10]
#
# Change: cpus-per-task, and add what your cluster asks for (account, partition, time).
# One task on each machine: `accelerate launch` starts the processes of its machine.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
# Five minutes before the time limit, processes save and end; --resume auto in the next job goes on.
#SBATCH --signal=USR1@300
set -euo pipefail
export RUN=${1:?"usage: sbatch --nodes N --gpus-per-node M RUN/slurm.sh RUN [settings]"}
shift
machines=$(sed -n 's/^num_machines: //p' "$RUN/accelerate.yaml")
if [ "$machines" != "$SLURM_NNODES" ]; then
    echo "$RUN/accelerate.yaml is for $machines machines, but the job has $SLURM_NNODES." \
        "Use sbatch --nodes $machines, or make the folder with longctx patch --nodes $SLURM_NNODES." >&2
    exit 1
fi
for recipe in "finetune --settings" "sft --config" "dpo --config"; do # which one the folder is for
    if [ -f "$RUN/${recipe% *}.yaml" ]; then break; fi
done
export RECIPE=${recipe% *} FLAG=${recipe#* }
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
PORT=$((10000 + SLURM_JOB_ID % 20000)) # jobs that share a machine have ports of their own
export FIRST PORT
# srun does not take over cpus-per-task by itself. In the quotes, each machine fills in its own rank.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
    trap "" USR1 # is for the processes, which take it; the launcher would die of it
    exec accelerate launch --config_file "$RUN/accelerate.yaml" --rdzv_conf timeout=300 \
        --machine_rank "$SLURM_NODEID" --main_process_ip "$FIRST" --main_process_port "$PORT" \
        -m "longctx_patch.recipes.$RECIPE" "$FLAG" "$RUN/$RECIPE.yaml" "$@"' launch "$@"
