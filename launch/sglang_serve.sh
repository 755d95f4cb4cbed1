#!/usr/bin/env bash
# One SGLang server, in the foreground. launch/sglang.sh puts this file into the environment that it makes.
#   usage: serve.sh MODEL_FOLDER PORT [options of sglang.launch_server]
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: serve.sh MODEL_FOLDER PORT [options of sglang.launch_server]" >&2
  exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=$1 port=$2
shift 2
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# A trainer may be silent for longer than SGLang's 5 s between two requests of a connection, and a request that meets
# the server closing it is lost.
export SGLANG_TIMEOUT_KEEP_ALIVE=${SGLANG_TIMEOUT_KEEP_ALIVE:-600}
options=(--model-path "$model" --port "$port" --skip-server-warmup)

# The value of an option, by any of its names, or 1.
value_of() {
  local found=1 previous='' word name
  for word in "${words[@]}"; do
    for name in "$@"; do
      [ "$previous" != "$name" ] || found=$word
      [[ "$word" != "$name="* ]] || found=${word#*=}
    done
    previous=$word
  done
  echo "$found"
}

if [ -d "$here/stubs" ]; then # on the CPU
  export PYTHONPATH="$here/stubs${PYTHONPATH:+:$PYTHONPATH}"
  export SGLANG_USE_CPU_ENGINE=1
  # More threads than cores are free make it many times slower.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  options+=(--device cpu --attention-backend torch_native --sampling-backend pytorch)
  options+=(--max-total-tokens 16384 --disable-cuda-graph --sleep-on-idle)
  # Without a list of cores, one entry for each worker, SGLang wants a NUMA node for each. Workers share cores where
  # they are more.
  words=("$@")
  tp=$(value_of --tp-size --tp --tensor-parallel-size)
  pp=$(value_of --pp-size --pp --pipeline-parallel-size)
  dp=$(value_of --dp-size --dp --data-parallel-size)
  workers=$((tp * pp * dp))
  cores=$(env -u OMP_NUM_THREADS nproc) # which believes that variable
  if [ "$workers" -gt 1 ] && [ -z "${SGLANG_CPU_OMP_THREADS_BIND:-}" ]; then
    bind=0
    for ((worker = 1; worker < workers; worker++)); do bind+="|$((worker % cores))"; done
    export SGLANG_CPU_OMP_THREADS_BIND=$bind
  fi
fi
exec "$here/venv/bin/python" -m sglang.launch_server "${options[@]}" "$@"
