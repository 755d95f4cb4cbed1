#!/usr/bin/env bash
# One run over several machines. Start this on every node, with the same arguments, within a few minutes:
#   NODES=4 GPUS_PER_NODE=8 HEAD=node0 ./launch/multi_node.sh --config-name my_run --config-dir configs/ \
#       parallel.tensor_model_parallel_size=4 parallel.pipeline_model_parallel_size=2
# Under Slurm: srun --ntasks-per-node 1 ./launch/multi_node.sh ...
set -euo pipefail

# How many machines, and how many processes (one per GPU) on each.
NODES=${NODES:-${SLURM_NNODES:?set NODES, the number of machines}}
GPUS_PER_NODE=${GPUS_PER_NODE:-$(nvidia-smi --list-gpus | wc -l)}

# The machine that hosts the rendezvous, and a name that keeps two runs on it apart.
HEAD=${HEAD:-$(scontrol show hostnames "${SLURM_JOB_NODELIST:?set HEAD, the name of the first machine}" | head -n 1)}
PORT=${PORT:-29500}
RUN_ID=${RUN_ID:-${SLURM_JOB_ID:-mppo}}

# Megatron relies on this order of communication and computation.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun \
  --nnodes "$NODES" \
  --nproc-per-node "$GPUS_PER_NODE" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD:$PORT" \
  --rdzv-id "$RUN_ID" \
  -m mppo train "$@"
