#!/usr/bin/env bash
# Profile a run on one machine with Nsight Systems. The nine steps of training, and the forward and backward of each
# micro-batch, are NVTX ranges.
#   GPUS_PER_NODE=8 ./launch/nsys.sh --config-name my_run trainer.total_training_steps=3
# Then: nsys stats --report nvtx_sum runs/profile.nsys-rep, or open the file in the Nsight Systems window.
set -euo pipefail
command -v nsys >/dev/null || { echo "nsys.sh: Nsight Systems (nsys) is not on the PATH" >&2; exit 1; }

GPUS_PER_NODE=${GPUS_PER_NODE:-$(nvidia-smi --list-gpus | wc -l)}
OUT=${OUT:-runs/profile}
mkdir -p "$(dirname "$OUT")"

export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec nsys profile \
  --output "$OUT" --force-overwrite true \
  --trace cuda,nvtx,osrt --sample none --cpuctxsw none \
  torchrun --standalone --nproc-per-node "$GPUS_PER_NODE" -m mppo train "$@"
